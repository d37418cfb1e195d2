"""A relay's heartbeat: what `spo status` shows, and where its neighbours find it."""

from __future__ import annotations

from common.streams import relays
from common.streams.broker import Broker
from common.streams.presence import Presence
from relay.relay import Relay


class Announcement(Presence):
    """Announces a relay to the run and to the processes on `host`, and tells the relay when the run is finished."""

    def __init__(self, broker: Broker, name: str, interval: float, relay: Relay, host: str) -> None:
        super().__init__(broker, name, "relay", interval)
        self._relay = relay
        self._near = host

    def beat(self) -> None:
        """Announce the relay now."""
        self.status(**self._relay.status())
        super().beat()
        relays.announce(self._broker, self._near, self.process_id, self._relay.server.endpoint())
        if self._broker.finished():
            self._relay.stopped.set()

    def stop(self, withdraw: bool = True) -> None:
        """Remove the relay, so that its neighbours look for another source at once."""
        super().stop(withdraw)
        relays.withdraw(self._broker, self._near, self.process_id)
