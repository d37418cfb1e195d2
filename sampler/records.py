"""Records that the sampler keeps in Redis, packed as msgpack or as array rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, ClassVar, Self

import msgpack
import numpy as np

from common.unpack import unpack


class Record:
    """Base of dataclasses with slots, packed as a list of their values in the order of the fields."""

    __slots__: tuple[str, ...] = ()
    _values: ClassVar[attrgetter[tuple[Any, ...]]]

    def __init_subclass__(cls) -> None:
        # `dataclass(slots=True)` creates a new class from the decorated one; only the new class has slots.
        if cls.__slots__:
            cls._values = attrgetter(*cls.__slots__)

    def pack(self) -> bytes:
        return msgpack.packb(self._values(self))

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        return cls(*unpack(data))


# A prompt's row in the tracker. An array, because a starting sampler may read a million rows at once.
TRACKER_ROWS = np.dtype(
    [
        ("alpha", "<f8"),
        ("beta", "<f8"),
        ("prior", "<f8"),  # the part of alpha that is left of its initial count; beta has as much
        ("visits", "<i8"),
        ("answered", "<i8"),  # newest version that answered it
        ("retired", "?"),
    ]
)


def packed_rows(rows: np.ndarray) -> Iterator[bytes]:
    """The bytes of each row of an array of `TRACKER_ROWS`."""
    data, size = rows.tobytes(), TRACKER_ROWS.itemsize
    return (data[start : start + size] for start in range(0, len(data), size))


def tracker_rows(packed: Iterable[bytes]) -> np.ndarray:
    """Many rows as one array of `TRACKER_ROWS`, [R]."""
    return np.frombuffer(b"".join(packed), TRACKER_ROWS)


@dataclass(slots=True)
class OpenSample(Record):
    """A counted sample that waits for its batch."""

    sample_id: str
    arrival: int  # position in the order of arrival
    baseline: float  # v, in [0, 1]; 0 if the method has another baseline
    reward: float
    tokens: int
    model_tokens: int
    oldest_version: int
    counted_at: int  # weight version when it was counted
    # Of each assistant turn, with `algorithm.turn_advantage: turn`: its return, and its tokens.
    turn_returns: list[float] = field(default_factory=list)
    turn_tokens: list[int] = field(default_factory=list)
    group: str = ""  # id of its group's first task; "" if there are no groups
    kept: bool = False  # its episode is in `rollouts/`
    row_tokens: list[int] = field(default_factory=list)  # tokens of each row; empty if it has one row

    @property
    def group_id(self) -> str:
        """Id of its group, which may be a group of one."""
        return self.group or self.sample_id


@dataclass(slots=True)
class DispatchedTask(Record):
    """A task whose header has not been counted."""

    prompt_id: str
    evaluation: bool
    version: int  # at dispatch; in an evaluation, the version at which it was due
    value: float  # v at dispatch
    group: str = ""
    replacements: int = 0  # number of skipped tasks that it replaces, one after another


@dataclass(slots=True)
class EvaluationCounts(Record):
    """The answers to one evaluation so far."""

    expected: int
    answered: int = 0
    correct: int = 0
    set_aside: int = 0
    restarts: int = 0
    version: int = -1  # the weights that answer it; -1 before the first answer
    dispatched: int = 0  # tasks sent so far

    @property
    def complete(self) -> bool:
        return self.answered + self.set_aside == self.expected

    @property
    def accuracy(self) -> float:
        """Share of the answers that are right; NaN if there is none."""
        return self.correct / self.answered if self.answered else math.nan
