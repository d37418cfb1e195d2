"""Lossless deltas between a chunk of weights and the same chunk of the previous version.

A step of training at a small learning rate leaves most bfloat16 weights as they are, and moves the others by a unit in
the last place. So the exclusive or of two versions is zero nearly everywhere. Before it is compressed, its bytes
are sorted into planes (all first bytes of the numbers, then all second bytes), because only low-order bytes change.
PULSE (arXiv 2602.03839) describes the effect; the format is our own.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import zstandard

from common.unpack import Buffer
from common.weights.wire import ITEM_SIZE, Manifest

LEVEL = 1  # of zstd; higher ones take longer and save a few percent
WORTH = 0.9  # a delta is sent if it is smaller than this share of its chunk
THREADS = max(1, min(8, (os.cpu_count() or 1) // 2))


class WrongDelta(Exception):
    """The bytes are not a delta of this chunk."""


def same_layout(one: Manifest, other: Manifest) -> bool:
    """True if two snapshots have the same tensors in the same places, cut into the same chunks."""
    return (
        (one.total_bytes, one.chunk_bytes) == (other.total_bytes, other.chunk_bytes)
        and one.names == other.names
        and one.dtypes == other.dtypes
        and one.shapes == other.shapes
        and one.offsets == other.offsets
    )


def item_bytes(manifest: Manifest) -> int:
    """Bytes per number in most of a snapshot; also the number of byte planes in its deltas."""
    counts: dict[int, int] = {}
    for dtype, shape in zip(manifest.dtypes, manifest.shapes, strict=True):
        size = ITEM_SIZE[dtype]
        counts[size] = counts.get(size, 0) + size * int(np.prod(shape, dtype=np.int64))
    return max(counts, key=lambda size: (counts[size], size), default=1)


def encode(chunk: Buffer, base: Buffer, width: int) -> bytes | None:
    """Compress the difference that turns `base` into `chunk`; None if that is hardly smaller than the chunk.

    Args:
        chunk, base: [N] bytes of two versions, of the same size.
        width: bytes of a number; if N is not a multiple of it, the last bytes follow the planes as they are.
    """
    difference = np.bitwise_xor(np.frombuffer(chunk, np.uint8), np.frombuffer(base, np.uint8))
    whole = len(difference) - len(difference) % width
    planes = np.empty_like(difference)
    np.copyto(planes[:whole].reshape(width, -1), difference[:whole].reshape(-1, width).T)
    planes[whole:] = difference[whole:]
    packed = zstandard.ZstdCompressor(level=LEVEL).compress(planes.data)
    return packed if len(packed) < WORTH * len(difference) else None


def decode(delta: Buffer, base: Buffer, width: int) -> memoryview:
    """Apply a delta made by `encode`; raises `WrongDelta` if it cannot be unpacked, or has another size.

    Only the checksum of the chunk tells whether the base was the right one.
    """
    size = len(base)
    try:
        # Checked first, so that no more memory is allocated than the chunk needs.
        if zstandard.frame_content_size(delta) != size:
            raise WrongDelta(f"not the delta of a chunk of {size} bytes")
        planes = np.frombuffer(zstandard.ZstdDecompressor().decompress(delta, max_output_size=size), np.uint8)
    except zstandard.ZstdError as error:
        raise WrongDelta(str(error)) from None
    if len(planes) != size:
        raise WrongDelta(f"not the delta of a chunk of {size} bytes")
    whole = size - size % width
    chunk = np.empty(size, np.uint8)
    np.copyto(chunk[:whole].reshape(-1, width), planes[:whole].reshape(width, -1).T)
    chunk[whole:] = planes[whole:]
    np.bitwise_xor(chunk, np.frombuffer(base, np.uint8), out=chunk)
    return chunk.data


def encode_all(chunks: Sequence[Buffer | None], bases: Sequence[Buffer | None], width: int) -> list[memoryview | None]:
    """Deltas of a whole snapshot's chunks, computed in threads, because numpy and zstd release the GIL."""

    def one(chunk: Buffer | None, base: Buffer | None) -> memoryview | None:
        packed = encode(chunk, base, width) if chunk is not None and base is not None else None
        return memoryview(packed) if packed is not None else None

    with ThreadPoolExecutor(THREADS, "deltas") as pool:
        return list(pool.map(one, chunks, bases))
