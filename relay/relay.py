"""Pulls the weights once and serves them to any number of neighbours, each chunk as soon as it has arrived."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Any

from common.config import WeightsConfig
from common.streams.broker import Broker
from common.streams.presence import LearnerWatch, Presence
from common.streams.relays import announce
from common.streams.relays import withdraw as withdraw_relay
from common.weights.delta import same_layout
from common.weights.follow import Endpoint, Follower, Sources
from common.weights.handover import HandedOver
from common.weights.memory import MemoryFile, Snapshot, Transfer
from common.weights.server import SnapshotServer
from common.weights.wire import Manifest


class Relay:
    """A weight server whose snapshots come from another weight server.

    A chunk that has arrived and has the right checksum is served at once, so each relay of a chain adds the time of a
    chunk, not of a snapshot. Memory holds the snapshot that is arriving or came last, and the one before while a client
    reads it; processes of this machine are handed that memory once the snapshot is whole.

    Args:
        learner: where the learner serves; asked regularly.
        config: the run's `learner.weights`, with the relay's own addresses; `curve_dir` protects both sides.
        name: shown to others.
        upstream: address to pull from, as long as it works; if None, the learner's.
        relays: those on this machine, of which `upstream` may be one.
        timeout: seconds of silence after which another upstream is chosen.

    Raises:
        UserError: the relay cannot serve at its address, or the keys cannot be read.
    """

    def __init__(
        self,
        learner: Callable[[], Endpoint | None],
        config: WeightsConfig,
        *,
        name: str = "relay",
        upstream: str | None = None,
        relays: Callable[[], Sequence[Endpoint]] = tuple,
        timeout: float = 10.0,
        log: Any,
    ) -> None:
        self.stopped = threading.Event()
        # Names may repeat, so a relay that pulls from itself, through others, recognises that by its id.
        relay_id = f"{name}#{secrets.token_hex(4)}"
        sources = Sources(learner, upstream or "direct", relays)
        self.follower = Follower(
            sources, self, config, timeout=timeout, stopped=self.stopped, relay_id=relay_id, log=log
        )
        self.server = SnapshotServer(config, option="--bind", path=lambda: [relay_id, *self.follower.path], log=log)
        self._log = log
        self._arriving: Snapshot | None = None
        self._last: Snapshot | None = None  # complete; the next one's deltas may build on it

    def run(self) -> None:
        """Relay until `stopped`; raises `UserError` as `Follower.run` does."""
        self.follower.run()

    def close(self) -> None:
        self.server.close()

    def status(self) -> dict[str, Any]:
        stats = self.follower.stats
        metrics = {"relay/sent_mb": self.server.sent.bytes / 1e6, "relay/pull_seconds": stats.seconds}
        status = {"source": stats.source, "sent_bytes": self.server.sent.bytes, "metrics": metrics}
        if self._last is None:
            return status | {"state": "waiting for weights"}
        return status | {"state": "running", "version": self._last.manifest.version}

    def begin(self, manifest: Manifest) -> Transfer:
        """Offer a snapshot before its first chunk has arrived."""
        last, size = self._last, manifest.total_bytes
        # Reuse memory that nothing reads, except the last snapshot's: deltas of the new one start from it.
        spare = self.server.spare()
        file = spare.file if spare is not None and spare is not last and spare.file.size == size else MemoryFile(size)
        self._arriving = Snapshot.arriving(manifest, file)
        self.server.serve(self._arriving)
        is_base = last is not None and last.name == manifest.base and same_layout(last.manifest, manifest)
        return Transfer(manifest, file, last.file if last is not None and is_base else None)

    def arrived(self, chunk: int, delta: memoryview | None) -> None:
        """Pass a chunk on, as a whole and as the delta that arrived."""
        assert self._arriving is not None
        data = self._arriving.file.view(*self._arriving.manifest.chunk_range(chunk))
        self.server.arrived(self._arriving, chunk, data, delta)

    def end(self, transfer: Transfer) -> None:
        self._done(transfer.seconds)

    def take(self, manifest: Manifest, handed: HandedOver, seconds: float) -> None:
        """Copy a snapshot, so that the process that serves it may soon reuse its memory."""
        transfer = self.begin(manifest)
        with contextlib.closing(handed):
            for chunk in range(len(manifest.checksums)):
                start, end = manifest.chunk_range(chunk)
                transfer.file.write(start, handed.file.view(start, end))
                self.arrived(chunk, None)
        self._done(seconds)

    def _done(self, seconds: float) -> None:
        assert self._arriving is not None
        version, is_first = self._arriving.manifest.version, self._last is None
        self._last, self._arriving = self._arriving, None
        if is_first:
            self._log.info("relaying", version=version, source=self.follower.stats.source)
        self._log.debug("weights", version=version, seconds=seconds)


class Announcement(Presence):
    """Announces a relay to the run and to the processes on `host`, and tells the relay when the run is finished."""

    def __init__(self, broker: Broker, name: str, interval: float, relay: Relay, host: str, log: Any) -> None:
        super().__init__(broker, name, "relay", interval)
        self._learner = LearnerWatch(broker, log)
        self._relay = relay
        self._near = host

    def beat(self) -> None:
        self.status(**self._relay.status())
        super().beat()
        announce(self._broker, self._near, self.process_id, self._relay.server.endpoint())
        if self._broker.finished():
            self._relay.stopped.set()
        else:
            self._learner.look()

    def stop(self, withdraw: bool = True) -> None:
        """Remove the relay, so that its neighbours look for another source at once."""
        super().stop(withdraw)
        withdraw_relay(self._broker, self._near, self.process_id)
