"""Pulls the weights once and serves them to any number of neighbours, each chunk as soon as it is there."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Any

from common.config import WeightsConfig
from common.weights.delta import same_layout
from common.weights.fetch import Base
from common.weights.follow import Follower
from common.weights.handover import shared_folder
from common.weights.listener import BindAddress
from common.weights.memory import MemoryFile
from common.weights.pull import ChunkPuller
from common.weights.server import SnapshotServer
from common.weights.snapshot import Snapshot
from common.weights.sources import Endpoint, Sources
from common.weights.taking import HandedOver, Taker
from common.weights.wire import Manifest

BIND = "tcp://127.0.0.1:*"


class Relay:
    """A weight server whose snapshots come from another weight server.

    A chunk that has arrived and has the right checksum is served at once. So a chain of relays adds the time of a chunk
    for each, not that of a snapshot. In memory are the snapshot that arrives or came last, and the one before for as
    long as somebody reads it; processes of this machine are handed that memory, once the snapshot is whole.

    Args:
        learner: where the learner serves; asked regularly.
        config: the run's `learner.weights`; `curve_dir` protects both sides.
        name: shown to others.
        bind: where to serve.
        advertise: what neighbours connect to, if it is not the bound address.
        upstream: address to pull from, as long as it works; None: the learner's.
        relays: those on this machine, of which `upstream` may be one.
        timeout: seconds of silence after which an upstream is given up.

    Raises:
        UserError: it cannot be served there, or the keys cannot be read.
    """

    def __init__(
        self,
        learner: Callable[[], Endpoint | None],
        config: WeightsConfig,
        *,
        name: str = "relay",
        bind: str = BIND,
        advertise: str | None = None,
        upstream: str | None = None,
        relays: Callable[[], Sequence[Endpoint]] = tuple,
        timeout: float = 10.0,
        log: Any,
    ) -> None:
        self.stopped = threading.Event()
        # Relays of one name are not the same: only this process should find itself in a circle.
        relay_id = f"{name}#{secrets.token_hex(4)}"
        sources = Sources(learner, upstream or "direct", relays)
        folder = shared_folder(config)
        puller = Taker(config, ChunkPuller(self, config.credit), self._handed_over, log)
        self.follower = Follower(
            sources,
            puller,
            config.curve_dir,
            timeout=timeout,
            stopped=self.stopped,
            deltas=config.deltas,
            relay_id=relay_id,
            log=log,
        )
        address = BindAddress(bind, advertise, config.curve_dir, "--bind")
        self.server = SnapshotServer(
            address, config.credit, path=lambda: [relay_id, *self.follower.path], folder=folder, log=log
        )
        self._log = log
        self._arriving: Snapshot | None = None
        self._last: Snapshot | None = None  # whole: what deltas of the next are from
        self._version: int | None = None

    def run(self) -> None:
        """Relay until `stopped`.

        Raises:
            UserError: see `Follower.run`.
        """
        self.follower.run()

    def close(self) -> None:
        """Stop serving."""
        self.server.close()

    def status(self) -> dict[str, Any]:
        """What `spo status` shows."""
        stats = self.follower.stats
        metrics = {"relay/sent_mb": self.server.sent.bytes / 1e6, "relay/pull_seconds": stats.seconds}
        status = {"source": stats.source, "sent_bytes": self.server.sent.bytes, "metrics": metrics}
        if self._version is None:
            return status | {"state": "waiting for weights"}
        return status | {"state": "running", "version": self._version}

    def begin(self, manifest: Manifest) -> None:
        """Offer a snapshot before its first chunk is there."""
        self._arriving = Snapshot.arriving(manifest, self._memory(manifest.total_bytes))
        self.server.serve(self._arriving)

    def _memory(self, size: int) -> MemoryFile | None:
        """What others can be handed, if they can at all; that of an older snapshot, where nothing needs it any more."""
        if self.server.handover is None:
            return None
        spare = self.server.spare()
        if spare is None or spare is self._last or spare.file is None or spare.file.size != size:
            return MemoryFile(size)
        return spare.file

    def base(self, manifest: Manifest) -> Base | None:
        """The snapshot before, where deltas are from that one."""
        last = self._last
        if last is None or last.name != manifest.base or not same_layout(last.manifest, manifest):
            return None
        return lambda chunk: last.chunks[chunk] or b""

    def chunk(self, index: int, data: memoryview, delta: memoryview | None) -> None:
        """Pass a chunk on, as it came and as a whole."""
        assert self._arriving is not None
        file = self._arriving.file
        if file is not None:
            start, end = self._arriving.manifest.chunk_range(index)
            file.write(start, data)
            data = file.view(start, end)
        self.server.arrived(self._arriving, index, data, delta)

    def end(self, seconds: float) -> None:
        """The snapshot is whole."""
        assert self._arriving is not None
        if self._version is None:
            self._log.info("relaying", version=self._arriving.manifest.version, source=self.follower.stats.source)
        self._version, self._last, self._arriving = self._arriving.manifest.version, self._arriving, None
        self._log.debug("weights", version=self._version, seconds=seconds)

    def _handed_over(self, manifest: Manifest, handed: HandedOver, seconds: float) -> None:
        """Copy a snapshot, so that how long it is served here is of no concern to the process that it comes from."""
        self.begin(manifest)
        assert self._arriving is not None
        with contextlib.closing(handed):
            for index in range(len(manifest.checksums)):
                data = handed.file.view(*manifest.chunk_range(index))
                self.chunk(index, data if self._arriving.file is not None else memoryview(bytes(data)), None)
        self.end(seconds)
