"""What is published for everyone to read, checked: another program or release may have written under the same keys."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Required

from pydantic import ConfigDict, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from common.unpack import Unreadable, unpack


class ProcessStatus(TypedDict, total=False):
    """What a process says of itself; each role adds what it likes."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    role: Required[str]
    pid: Required[int]
    host: Required[str]
    state: Required[str]
    version: int
    tokens_per_second: float
    episodes: int
    source: str
    sent_bytes: int
    variance_ratio: float | None


class EvaluationResult(TypedDict, total=False):
    """A complete evaluation: `set_aside` and `samples` count answers, `figures` has all that was measured, by name."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    version: Required[int]
    accuracy: Required[float]
    samples: Required[int]
    reward: float
    set_aside: int
    figures: dict[str, float]


class RelayEntry(TypedDict):
    """Where a relay serves weights, and when it said so, in seconds of Redis' clock."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    name: str
    address: str
    at: float


class Evaluations(NamedTuple):
    """Results by version, oldest first, and how many could not be read."""

    results: list[dict[str, Any]]
    unreadable: int


_PROCESS = TypeAdapter(ProcessStatus)
_EVALUATION = TypeAdapter(EvaluationResult)
_RELAY = TypeAdapter(RelayEntry)


def process_status(data: bytes) -> dict[str, Any]:
    """What a process says of itself; of one that says what nobody understands, only that."""
    return _read(_PROCESS, data) or {"role": "unknown", "state": "unreadable"}


def evaluations(entries: Iterable[bytes]) -> Evaluations:
    """The results that can be read."""
    values = [_read(_EVALUATION, data) for data in entries]
    results = [value for value in values if value is not None]
    return Evaluations(sorted(results, key=lambda result: result["version"]), len(values) - len(results))


def relay_entry(data: bytes) -> dict[str, Any] | None:
    """What a relay announced; None where it cannot be read."""
    return _read(_RELAY, data)


def _read(kind: TypeAdapter[Any], data: bytes) -> dict[str, Any] | None:
    try:
        value: dict[str, Any] = kind.validate_python(unpack(data), strict=True)
    except (Unreadable, ValidationError):
        return None
    return value
