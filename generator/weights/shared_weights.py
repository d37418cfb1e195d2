"""Weights in shared memory, mapped by every engine process: written once by the transfer, or the learner's own copy."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from common.config import WeightsConfig
from common.weights.connection import Connection
from common.weights.delta import same_layout
from common.weights.fetch import Base
from common.weights.memory import MemoryFile
from common.weights.pull import ChunkPuller, TransferStats
from common.weights.taking import HandedOver, Taker
from common.weights.wire import Buffer, Manifest


class MemoryPool:
    """Keeps the memory of the last transfer for the next: writing to fresh memory takes ten times as long.

    A file is given out to one user, may be shared with others, and is free when all have given it back.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: dict[MemoryFile, int] = {}
        self._spare: MemoryFile | None = None
        self._open = True

    def take(self, size: int) -> MemoryFile:
        """A file of `size` bytes, with whatever it holds."""
        with self._lock:
            spare, self._spare = self._spare, None
        if spare is not None and spare.size != size:
            spare.close()
            spare = None
        file = spare or MemoryFile(size)
        with self._lock:
            self._users[file] = 1
        return file

    def share(self, file: MemoryFile) -> None:
        """Another user of a file that was taken."""
        with self._lock:
            self._users[file] += 1

    def users(self, file: MemoryFile) -> int:
        """How many have yet to give a file back."""
        with self._lock:
            return self._users.get(file, 0)

    def give_back(self, file: MemoryFile) -> None:
        """One user is done. A file that nobody uses is kept, or closed if there is one already."""
        with self._lock:
            self._users[file] -= 1
            if self._users[file]:
                return
            del self._users[file]
            if self._open and self._spare is None:
                self._spare = file
                return
        file.close()

    def close(self) -> None:
        """Give all memory back, that of files still in use as soon as they are given back."""
        with self._lock:
            self._open = False
            if self._spare is not None:
                self._spare.close()
                self._spare = None


class SharedWeights(AbstractContextManager[Any]):
    """One snapshot in a memory file.

    Attributes:
        version: weight version.
        seconds: how long the transfer took.
    """

    def __init__(self, manifest: Manifest, file: MemoryFile, give_back: Callable[[MemoryFile], None]) -> None:
        self.manifest = manifest
        self.version = manifest.version
        self.seconds = 0.0
        self.path = file.path
        self._file: MemoryFile | None = file
        self._give_back = give_back

    def write(self, start: int, data: Buffer) -> None:
        """Put bytes of the snapshot in their place."""
        assert self._file is not None
        self._file.write(start, data)

    def view(self, start: int, end: int) -> memoryview:
        """Bytes of the snapshot."""
        assert self._file is not None
        return self._file.view(start, end)

    def share(self, pool: MemoryPool) -> MemoryFile:
        """Its file, for another user of the pool, who gives it back too."""
        assert self._file is not None
        pool.share(self._file)
        return self._file

    def update_info(self) -> dict[str, Any]:
        """What vLLM's workers need to load the weights (see `weight_engine.UpdateInfo`)."""
        manifest = self.manifest
        return {
            "path": self.path,
            "names": manifest.names,
            "dtypes": manifest.dtypes,
            "shapes": manifest.shapes,
            "offsets": manifest.offsets,
        }

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """The weights are loaded everywhere, or not wanted; may be called again."""
        if self._file is not None:
            file, self._file = self._file, None
            self._give_back(file)


class SharedMemoryBackend:
    """Takes each snapshot where it lies in shared memory, else pulls it into some; a `Backend` of `WeightClient`.

    Args:
        deliver: gets each snapshot when it is whole.
        config: the run's `learner.weights`.
    """

    def __init__(self, deliver: Callable[[SharedWeights], None], config: WeightsConfig, log: Any) -> None:
        self._deliver = deliver
        self._puller = Taker(config, ChunkPuller(self, config.credit), self._handed_over, log)
        self._pool = MemoryPool()
        self._arriving: SharedWeights | None = None
        self._last: tuple[Manifest, MemoryFile] | None = None  # whole: what deltas of the next are from
        self._base: MemoryFile | None = None  # of the weights on their way; may be their own file
        self._keep = False

    def pull(self, connection: Connection, manifest: Manifest, stats: TransferStats) -> bool:
        """See `common.weights.follow.Puller`."""
        self._keep = connection.deltas
        return self._puller.pull(connection, manifest, stats)

    def begin(self, manifest: Manifest) -> None:
        """Make room for weights on their way: in place, if deltas are from the last weights and these are loaded."""
        self._forget_arriving()
        self._base, last, self._last = None, self._last, None
        if last is not None and (last[0].snapshot != manifest.base or not same_layout(last[0], manifest)):
            self._pool.give_back(last[1])
            last = None
        if last is not None and self._pool.users(last[1]) == 1:
            self._base = file = last[1]
        else:
            file = self._pool.take(manifest.total_bytes)
            if last is not None:
                self._base, self._last = last[1], last
        self._arriving = SharedWeights(manifest, file, self._pool.give_back)

    def base(self, manifest: Manifest) -> Base | None:
        """The last weights, where deltas are from those. In place, a chunk that is missing is still theirs."""
        file = self._base
        return None if file is None else lambda chunk: file.view(*manifest.chunk_range(chunk))

    def chunk(self, index: int, data: memoryview, delta: memoryview | None) -> None:
        """Put a chunk in its place."""
        assert self._arriving is not None
        self._arriving.write(self._arriving.manifest.chunk_range(index)[0], data)

    def end(self, seconds: float) -> None:
        """Hand the weights out."""
        assert self._arriving is not None
        weights, self._arriving = self._arriving, None
        weights.seconds = seconds
        self._forget_last()
        if self._keep:
            self._last = weights.manifest, weights.share(self._pool)
        self._deliver(weights)

    def _handed_over(self, manifest: Manifest, handed: HandedOver, seconds: float) -> None:
        """Hand out weights that lie in the memory of another process."""
        self._forget_arriving()
        self._forget_last()
        weights = SharedWeights(manifest, handed.file, lambda file: handed.close())
        weights.seconds = seconds
        self._deliver(weights)

    def _forget_arriving(self) -> None:
        if self._arriving is not None:
            self._arriving.close()
            self._arriving = None

    def _forget_last(self) -> None:
        last, self._last, self._base = self._last, None, None
        if last is not None:
            self._pool.give_back(last[1])

    def close(self) -> None:
        """Give all memory back."""
        self._forget_last()
        self._forget_arriving()
        self._pool.close()
