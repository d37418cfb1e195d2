"""Wire format of the weights: what a learner offers and how a generator asks for it. Imports no torch.

A generator sends `Poll` with the snapshot it has and hears a `Manifest` once there is another one; then
it asks for the snapshot chunk by chunk (`Fetch`), at most `credit` at a time. Each message is one frame
of msgpack; a `Chunk` is followed by one frame of raw bytes.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

import msgpack
import xxhash
from pydantic import Field, TypeAdapter, ValidationError, model_validator

from common.messages import InvalidMessage, Message

Buffer = bytes | bytearray | memoryview

ALIGNMENT = 64  # bytes; tensors start at a multiple of it, so that any dtype can be viewed in place

ITEM_SIZE = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


class Poll(Message):
    """Tell me as soon as there is a snapshot other than the one I have."""

    kind: Literal["poll"] = "poll"
    have: str = Field("", description="Snapshot the generator has; empty: none.")


class Fetch(Message):
    """Send me one chunk."""

    kind: Literal["fetch"] = "fetch"
    snapshot: str
    chunk: int = Field(..., ge=0)


class Manifest(Message):
    """A snapshot: its tensors, column by column ([N] each), and the checksums of its chunks.

    A snapshot is known by its own name, not by its version: a learner that resumes from a checkpoint
    publishes a version number again, with other weights.
    """

    kind: Literal["manifest"] = "manifest"
    snapshot: str
    version: int = Field(..., ge=0)
    total_bytes: int = Field(..., ge=0)
    chunk_bytes: int = Field(..., ge=1)
    checksums: list[int] = Field(..., description="xxh3_64 of each chunk.")
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    offsets: list[int] = Field(..., description="Bytes from the start of the snapshot.")

    @model_validator(mode="after")
    def _describes_its_bytes(self) -> Self:
        if not len(self.names) == len(self.dtypes) == len(self.shapes) == len(self.offsets):
            raise ValueError("columns of different lengths")
        if len(self.checksums) != math.ceil(self.total_bytes / self.chunk_bytes):
            raise ValueError(f"{len(self.checksums)} checksums for {self.total_bytes} bytes")
        end = 0
        for name, dtype, shape, offset in zip(self.names, self.dtypes, self.shapes, self.offsets, strict=True):
            if dtype not in ITEM_SIZE or min(shape, default=0) < 0:
                raise ValueError(f"tensor {name} of type {dtype} and shape {shape}")
            if offset < end or offset % ALIGNMENT:
                raise ValueError(f"tensor {name} at byte {offset}")
            end = offset + ITEM_SIZE[dtype] * math.prod(shape)
        if end > self.total_bytes:
            raise ValueError("tensors leave the snapshot")
        return self

    def chunk_range(self, chunk: int) -> tuple[int, int]:
        """First byte of a chunk and the one after its last."""
        start = chunk * self.chunk_bytes
        return start, min(start + self.chunk_bytes, self.total_bytes)


class Chunk(Message):
    """One chunk; its bytes are the next frame."""

    kind: Literal["chunk"] = "chunk"
    snapshot: str
    chunk: int = Field(..., ge=0)


class Gone(Message):
    """The snapshot is no longer served: poll again."""

    kind: Literal["gone"] = "gone"
    snapshot: str


class Refused(Message):
    """The request was not understood."""

    kind: Literal["refused"] = "refused"
    reason: str


_REQUEST: TypeAdapter[Any] = TypeAdapter(Annotated[Poll | Fetch, Field(discriminator="kind")])
_REPLY: TypeAdapter[Any] = TypeAdapter(Annotated[Manifest | Chunk | Gone | Refused, Field(discriminator="kind")])


def unpack_request(data: Buffer) -> Poll | Fetch:
    """Read what a generator sent; raises `InvalidMessage`."""
    return _unpack(_REQUEST, "weight request", data)


def unpack_reply(data: Buffer) -> Manifest | Chunk | Gone | Refused:
    """Read what the learner answered; raises `InvalidMessage`."""
    return _unpack(_REPLY, "weight reply", data)


def checksum(data: Buffer) -> int:
    """xxh3_64 of a chunk."""
    return xxhash.xxh3_64_intdigest(data)


def _unpack(adapter: TypeAdapter[Any], what: str, data: Buffer) -> Any:
    try:
        return adapter.validate_python(msgpack.unpackb(data))
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidMessage(f"{what}: {'.'.join(map(str, first['loc'])) or 'message'}: {first['msg']}") from None
    except Exception as error:
        raise InvalidMessage(f"{what}: not msgpack ({error or type(error).__name__})") from None
