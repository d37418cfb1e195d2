"""Wire format of the weights, between a learner or a relay and its clients.

A client sends `Poll` with the snapshot it has and gets a `Manifest` once there is another one; then it asks for the
snapshot chunk by chunk (`Fetch`), at most `CREDIT` at a time. A client that has the snapshot before it may ask for
deltas (`common.weights.delta`), and gets for each chunk a delta or the chunk itself. `Hello` is answered with `Welcome`
at once. Each message is one frame of msgpack; a `Chunk` is followed by one frame of raw bytes. The manifest has the
checksums of the chunks and one of its own.

A snapshot's name is `LIFE-NUMBER`: an id of the learner's start, and the snapshot's number within it. The version
alone does not identify it: a learner that resumes from a checkpoint publishes the same version with other weights.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal, Self

import msgpack
import xxhash
from pydantic import Field, TypeAdapter, ValidationError, model_validator

from common.messages import InvalidMessage, Message, Texts, Version, first_problem
from common.unpack import Buffer, Unreadable, unpack

CHUNK_BYTES = 8 << 20  # of each chunk but the last
CREDIT = 8  # chunks that a client requests ahead
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

MAX_MANIFEST = 1 << 20  # values
MAX_SNAPSHOT = 1 << 50  # bytes

SnapshotName = Annotated[str, Field(pattern=r"^[0-9a-z]+-[0-9]{1,18}$", max_length=100)]
Checksum = Annotated[int, Field(ge=0, lt=1 << 64)]
Index = Annotated[int, Field(ge=0, lt=1 << 31)]
Offset = Annotated[int, Field(ge=0, le=MAX_SNAPSHOT)]


def life_of(snapshot: str) -> str:
    """The id of the learner's start that a snapshot comes from; empty for no snapshot."""
    return snapshot.rpartition("-")[0]


def supersedes(offered: str, have: str) -> bool:
    """True if a snapshot replaces another: it comes from another start of the learner, or later from the same one."""
    if life_of(offered) != life_of(have):
        return True
    return int(offered.rpartition("-")[2]) > int(have.rpartition("-")[2])


class _Versioned(Message):
    v: Literal[2] = 2  # type: ignore[assignment]  # the version of this protocol: servers of another one refuse it


class Poll(_Versioned):
    """Asks for the manifest of a snapshot that supersedes the client's, as soon as there is one."""

    kind: Literal["poll"] = "poll"
    have: SnapshotName | Literal[""] = Field("", description="Snapshot that the client has; empty if it has none.")
    deltas: bool = Field(False, description="Deltas from it are worth making: the client would ask for them.")


class Hello(_Versioned):
    """Asks for a `Welcome`, to find out whether the server is there."""

    kind: Literal["hello"] = "hello"


class Fetch(_Versioned):
    kind: Literal["fetch"] = "fetch"
    snapshot: str = Field(..., max_length=100)
    chunk: Index
    delta: bool = Field(False, description="The client has the snapshot's base: a delta will do.")


class Manifest(Message):
    """A snapshot: its tensors, column by column ([N] each), and the checksums of its chunks."""

    max_values: ClassVar[int] = MAX_MANIFEST

    kind: Literal["manifest"] = "manifest"
    snapshot: SnapshotName
    base: SnapshotName | Literal[""] = Field("", description="The snapshot its deltas are from; empty if it has none.")
    version: Version
    total_bytes: Offset
    chunk_bytes: int = Field(..., ge=1, le=MAX_SNAPSHOT)
    checksums: Annotated[list[Checksum], Field(fail_fast=True)] = Field(..., description="xxh3_64 of each chunk.")
    names: Texts
    dtypes: Texts
    shapes: Annotated[list[Annotated[list[Offset], Field(fail_fast=True), Field(max_length=16)]], Field(fail_fast=True)]
    offsets: Annotated[list[Offset], Field(fail_fast=True)] = Field(
        ..., description="Bytes from the start of the snapshot."
    )
    check_token_ids: Annotated[list[Index], Field(fail_fast=True)] = Field(
        default_factory=list, description="A fixed prompt [T]; empty if there is none."
    )
    check_logprobs: Annotated[list[float], Field(fail_fast=True)] = Field(
        default_factory=list, description="Log-probs of its tokens but the first by the learner [T - 1]."
    )
    own_checksum: Checksum = Field(0, description="xxh3_64 of the packed manifest with 0 here; set when it is packed.")

    @model_validator(mode="after")
    def _describes_its_bytes(self) -> Self:
        if not len(self.names) == len(self.dtypes) == len(self.shapes) == len(self.offsets):
            raise ValueError("columns of different lengths")
        if len(self.check_logprobs) != max(len(self.check_token_ids) - 1, 0):
            raise ValueError("a fixed prompt and log-probs of different lengths")
        if len(self.checksums) != math.ceil(self.total_bytes / self.chunk_bytes):
            raise ValueError(f"{len(self.checksums)} checksums for {self.total_bytes} bytes")
        end = 0
        for name, dtype, shape, offset in zip(self.names, self.dtypes, self.shapes, self.offsets, strict=True):
            if dtype not in ITEM_SIZE:
                raise ValueError(f"tensor {name[:100]} of type {dtype[:100]}")
            if offset < end or offset % ALIGNMENT:
                raise ValueError(f"tensor {name[:100]} at byte {offset}")
            end = offset + ITEM_SIZE[dtype] * math.prod(shape)
        if end > self.total_bytes:
            raise ValueError("tensors leave the snapshot")
        return self

    def pack(self) -> bytes:
        return msgpack.packb(self.__dict__ | {"own_checksum": self.computed_checksum()})

    def computed_checksum(self) -> int:
        return checksum(msgpack.packb(self.__dict__ | {"own_checksum": 0}))

    def chunk_range(self, chunk: int) -> tuple[int, int]:
        """First byte of a chunk and the one after its last."""
        start = chunk * self.chunk_bytes
        return start, min(start + self.chunk_bytes, self.total_bytes)


class Chunk(Message):
    """One chunk; its bytes, or its delta, are the next frame."""

    kind: Literal["chunk"] = "chunk"
    snapshot: str = Field(..., max_length=100)
    chunk: Index
    delta: bool = False


class Gone(Message):
    """The snapshot is no longer served: poll again."""

    kind: Literal["gone"] = "gone"
    snapshot: str = Field(..., max_length=100)


class Welcome(Message):
    kind: Literal["welcome"] = "welcome"
    path: list[str] = Field(..., description="Relays from here up to the learner, this one first.")
    handover: Annotated[str, Field(pattern=r"^([0-9a-f-]{1,80}\.sock)?$")] = Field(
        "", description="Unix socket that hands over shared memory (`common.weights.handover`); empty if there is none."
    )
    token: str = Field("", max_length=100, description="Required by that socket.")


class Refused(Message):
    """The request was not understood."""

    kind: Literal["refused"] = "refused"
    reason: str


Request = Poll | Fetch | Hello
Reply = Manifest | Chunk | Gone | Welcome | Refused

_REQUEST: TypeAdapter[Any] = TypeAdapter(Annotated[Request, Field(discriminator="kind")])
_REPLY: TypeAdapter[Any] = TypeAdapter(Annotated[Reply, Field(discriminator="kind")])


def unpack_request(data: Buffer) -> Request:
    """Read what a client sent; raises `InvalidMessage`."""
    return _unpack(_REQUEST, "weight request", data)


def unpack_reply(data: Buffer) -> Reply:
    """Read what a server answered; raises `InvalidMessage`."""
    reply = _unpack(_REPLY, "weight reply", data)
    if isinstance(reply, Manifest) and reply.own_checksum != reply.computed_checksum():
        raise InvalidMessage(f"weight reply: manifest of {reply.snapshot} with a wrong checksum")
    return reply


def checksum(data: Buffer) -> int:
    """xxh3_64 of a chunk or a manifest."""
    return xxhash.xxh3_64_intdigest(data)


def _unpack(adapter: TypeAdapter[Any], what: str, data: Buffer) -> Any:
    try:
        return adapter.validate_python(unpack(data, max_values=MAX_MANIFEST))
    except ValidationError as error:
        raise InvalidMessage(f"{what}: {first_problem(error)}") from None
    except Unreadable as error:
        raise InvalidMessage(f"{what}: {error}") from None
