"""What the sampler keeps in Redis, packed, one class a kind of value."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

_ROW = struct.Struct("<ddq?")
_OPEN = struct.Struct("<qdd4q")
_DISPATCHED = struct.Struct("<?qd")
_COUNTS = struct.Struct("<4qd")


@dataclass(slots=True)
class TrackerRow:
    """What is known of one prompt."""

    alpha: float
    beta: float
    answered: int  # newest version that answered it
    retired: bool

    def pack(self) -> bytes:
        return _ROW.pack(self.alpha, self.beta, self.answered, self.retired)

    @classmethod
    def unpack(cls, data: bytes) -> TrackerRow:
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
class DispatchedTask:
    """A task whose header has not been counted."""

    prompt_id: str
    evaluation: bool
    version: int  # at dispatch; of an evaluation, the version it evaluates
    value: float  # v at dispatch

    def pack(self) -> bytes:
        return _DISPATCHED.pack(self.evaluation, self.version, self.value) + self.prompt_id.encode()

    @classmethod
    def unpack(cls, data: bytes) -> DispatchedTask:
        evaluation, version, value = _DISPATCHED.unpack_from(data)
        return cls(data[_DISPATCHED.size :].decode(), evaluation, version, value)


@dataclass(slots=True)
class EvaluationCounts:
    """The answers to one evaluation so far."""

    expected: int
    answered: int = 0
    correct: int = 0
    set_aside: int = 0
    reward: float = 0.0  # sum

    @property
    def complete(self) -> bool:
        return self.answered + self.set_aside == self.expected

    @property
    def accuracy(self) -> float:
        """Share of the answers with full reward; NaN if there is none."""
        return self.correct / self.answered if self.answered else math.nan

    def pack(self) -> bytes:
        return _COUNTS.pack(self.expected, self.answered, self.correct, self.set_aside, self.reward)

    @classmethod
    def unpack(cls, data: bytes) -> EvaluationCounts:
        return cls(*_COUNTS.unpack(data))
