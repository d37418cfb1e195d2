"""Where weights can be pulled from, and which of these is best now."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

AVOID = 15.0  # seconds for which a relay that failed is not chosen; twice as long each time it fails again
AVOID_MOST = 600.0

Endpoint = Mapping[str, str]


@dataclass(frozen=True)
class Source:
    """A server of weights.

    Attributes:
        server_key: its public key if it said so; empty: unknown or none.
        password: what it wants to hear where it has no key; empty: unknown or none.
        relay: what a relay is called; empty for the learner itself.
        configured: the user has given its address.
    """

    address: str
    server_key: str = ""
    relay: str = ""
    configured: bool = False
    password: str = ""

    @classmethod
    def of(cls, endpoint: Endpoint, relay: str = "") -> Source:
        """What an endpoint describes."""
        return cls(
            endpoint["address"], endpoint.get("server_key", ""), relay=relay, password=endpoint.get("password", "")
        )


class Sources:
    """Relays first, those that failed lately left out; the learner last.

    Args:
        learner: where the learner serves, as `SnapshotServer.endpoint` returns it; None while that is unknown.
        relay: `auto`: the relays of `relays`; `direct`: none; else the address of the only one.
        relays: those nearby, as `SnapshotServer.endpoint` returns them and with their `name`.

    Attributes:
        newest: the snapshot that the learner serves, as it was at the last choice; empty if unknown.
    """

    def __init__(
        self,
        learner: Callable[[], Endpoint | None],
        relay: str = "direct",
        relays: Callable[[], Sequence[Endpoint]] = tuple,
    ) -> None:
        self.newest = ""
        self._learner = learner
        self._relay = relay
        self._relays = relays
        self._avoided: dict[str, float] = {}
        self._failures: dict[str, int] = {}

    def choose(self) -> Source | None:
        """The best source now; None while there is none."""
        learner = self._learner()
        self.newest = learner.get("snapshot", "") if learner else ""
        relays = self._candidates(learner)
        good = [relay for relay in relays if self._avoided.get(relay.address, 0.0) <= time.monotonic()]
        if good:
            return good[0]
        if learner:
            return Source.of(learner)
        # One that failed is better than nobody.
        return relays[0] if relays else None

    def failed(self, source: Source) -> None:
        """Prefer others for a while."""
        if source.relay:
            failures = self._failures[source.address] = self._failures.get(source.address, 0) + 1
            self._avoided[source.address] = time.monotonic() + min(AVOID_MOST, AVOID * 2 ** (failures - 1))

    def worked(self, source: Source) -> None:
        """A snapshot came from there."""
        self._failures.pop(source.address, None)
        self._avoided.pop(source.address, None)

    def _candidates(self, learner: Endpoint | None) -> list[Source]:
        if self._relay == "direct":
            return []
        if self._relay != "auto":
            password = self._password_of(self._relay, [*self._relays(), *([learner] if learner else [])])
            return [Source(self._relay, relay=self._relay, configured=True, password=password)]
        return [Source.of(near, relay=near["name"]) for near in self._relays()]

    def _password_of(self, address: str, endpoints: Sequence[Endpoint]) -> str:
        """Of the server at an address given by the user; one without keys is on this machine, known by its port."""
        port = address.rpartition(":")[2]
        passwords = [one["password"] for one in endpoints if "password" in one and one["address"].endswith(f":{port}")]
        return passwords[0] if passwords else ""
