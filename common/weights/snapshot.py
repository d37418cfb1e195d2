"""One version's weights as they are served: whole from the beginning, or chunk by chunk as they arrive."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

from common.weights.memory import MemoryFile
from common.weights.wire import Manifest


@dataclass(eq=False)
class Snapshot:
    """The manifest, packed once, and the chunks it describes.

    Attributes:
        chunks: bytes of each; None until it has arrived.
        deltas: of each chunk from the manifest's `base`; None where there is none, so that the chunk itself is sent.
        memory: what holds the chunks, if it can serve again for another snapshot; else None.
        file: that memory, where other processes of this machine can be handed it.
    """

    manifest: Manifest
    chunks: list[memoryview | None]
    memory: Any = None
    deltas: list[memoryview | None] = field(default_factory=list)
    file: MemoryFile | None = None
    packed_manifest: bytes = field(init=False)

    def __post_init__(self) -> None:
        self.packed_manifest = self.manifest.pack()
        self.deltas = self.deltas or [None] * len(self.chunks)

    @classmethod
    def whole(cls, manifest: Manifest, data: memoryview, memory: Any = None, file: MemoryFile | None = None) -> Self:
        """All chunks are there, one after another in `data`; none is copied."""
        ranges = map(manifest.chunk_range, range(len(manifest.checksums)))
        return cls(manifest, [data[start:end] for start, end in ranges], memory, file=file)

    @classmethod
    def arriving(cls, manifest: Manifest, file: MemoryFile | None = None) -> Self:
        """No chunk is there yet; with a file, each is to be put into it."""
        return cls(manifest, [None] * len(manifest.checksums), memory=file, file=file)

    @property
    def name(self) -> str:
        """See `common.weights.wire`."""
        return self.manifest.snapshot

    @property
    def complete(self) -> bool:
        """Whether all chunks are there."""
        return None not in self.chunks
