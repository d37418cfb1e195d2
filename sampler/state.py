"""What the sampler keeps in Redis, packed: enough to go on after a kill as if nothing had happened."""

from __future__ import annotations

import struct
from dataclasses import dataclass

_ROW = struct.Struct("<ddq?")
_OPEN = struct.Struct("<qdd4q")
_MEMO = struct.Struct("<?qd")


@dataclass(slots=True)
class Row:
    """The tracker's knowledge of one prompt."""

    alpha: float
    beta: float
    answered: int  # newest version that answered it
    retired: bool

    def pack(self) -> bytes:
        return _ROW.pack(self.alpha, self.beta, self.answered, self.retired)

    @classmethod
    def unpack(cls, data: bytes) -> Row:
        return cls(*_ROW.unpack(data))


@dataclass(slots=True)
class OpenSample:
    """A counted sample that waits for its batch."""

    sample_id: str
    arrival: int  # position in the order of arrival
    advantage: float  # r - v, before normalisation
    reward: float
    tokens: int
    model_tokens: int
    oldest_version: int
    counted_at: int  # weight version when it was counted

    def pack(self) -> bytes:
        return _OPEN.pack(
            self.arrival, self.advantage, self.reward, self.tokens, self.model_tokens, self.oldest_version,
            self.counted_at,
        )  # fmt: skip

    @classmethod
    def unpack(cls, sample_id: str, data: bytes) -> OpenSample:
        return cls(sample_id, *_OPEN.unpack(data))


@dataclass(slots=True)
class InFlight:
    """A dispatched task whose header has not been counted."""

    prompt_id: str
    evaluation: bool
    version: int  # at dispatch; of an evaluation, the version it evaluates
    baseline: float  # v at dispatch

    def pack(self) -> bytes:
        return _MEMO.pack(self.evaluation, self.version, self.baseline) + self.prompt_id.encode()

    @classmethod
    def unpack(cls, data: bytes) -> InFlight:
        evaluation, version, baseline = _MEMO.unpack_from(data)
        return cls(data[_MEMO.size :].decode(), evaluation, version, baseline)
