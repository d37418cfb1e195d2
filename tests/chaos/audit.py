"""The audit of a run, from records that were written beside it: was anything lost, or counted twice?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from common.messages import Step
from common.streams.broker import Broker
from common.streams.ledger import JournalEntry, read_journal
from sampler.records import tracker_rows
from sampler.tracker import ValueTracker

SHOWN = 3  # examples of what is wrong
# What a run that is over leaves in Redis, beside streams that must be empty.
KEPT = {
    "alive", "config", "counters", "endpoints", "evaluations", "finished", "holders", "journal", "learner", "lease",
    "processes", "release", "state", "steps", "takeovers", "tracker",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Books:
    """What is left of a run, read from its Redis.

    Attributes:
        steps: versions that the learner has announced, in order; with True where it began from a checkpoint.
        values: the row of each prompt that was answered.
        population: the state of the prior; None with the paper's.
        leftovers: keys that belong to nothing any more.
    """

    journal: list[JournalEntry]
    steps: list[tuple[int, bool]]
    counters: dict[str, int]
    outstanding: list[str]
    values: dict[str, bytes]
    population: bytes | None
    leftovers: list[str]


@dataclass(frozen=True, slots=True)
class Start:
    """Where the counts begin: with nothing, or with what was restored from the run folder after Redis was lost.

    Attributes:
        version: of the weights, and number of the first batch.
        dispatched: tasks before it.
        commits: that restored it.
        rows: of the tracker, packed, by prompt id.
        population: the state of the prior, if there was one.
    """

    version: int
    dispatched: int
    commits: int
    rows: Mapping[str, bytes]
    population: bytes | None

    @classmethod
    def of(cls, journal: Sequence[JournalEntry]) -> Self:
        """Read from the journal. A restoration that was cut off is repeated, with the same values."""
        rows: dict[str, bytes] = {}
        values: dict[str, Any] = {}
        commits = max((i + 1 for i, entry in enumerate(journal) if entry.restored), default=0)
        for entry in journal[:commits]:
            rows |= entry.restored.get("rows", {})
            values |= entry.restored
        return cls(values.get("version", 0), values.get("dispatched", 0), commits, rows, values.get("population"))


@dataclass(frozen=True, slots=True)
class AuditLine:
    """One line of the audit: what must hold, and what does not; empty where it does."""

    name: str
    problem: str


def read_books(broker: Broker) -> Books:
    """Everything the audit needs, of a run that is over and that no process writes any more."""
    redis, key = broker.redis, broker.key
    announced = [Step.unpack(fields[b"step"]) for _, fields in redis.xrange(key("steps"))]
    return Books(
        journal=list(read_journal(broker)),
        steps=[(step.version, not step.metrics) for step in announced],
        counters=broker.counters(),
        outstanding=[task_id.decode() for task_id in redis.hkeys(key("outstanding"))],
        values={name.decode(): row for name, row in redis.hgetall(key("tracker")).items()},
        population=redis.hget(key("state"), "population"),
        leftovers=sorted(_leftovers(broker)),
    )


def audit(books: Books, tracker: ValueTracker, steps: int) -> list[AuditLine]:
    """Every line of the audit.

    Args:
        tracker: one that has counted nothing yet, of the same prompts and configuration.
        steps: of the run.
    """
    return [AuditLine(name, problem) for name, problem in _checks(books, tracker, steps)]


def _checks(books: Books, tracker: ValueTracker, steps: int) -> Iterator[tuple[str, str]]:
    journal, counters, start = books.journal, books.counters, Start.of(books.journal)
    if start.version:
        # Its last commit is that of a round, which sends tasks.
        early = [task_id for entry in journal[: start.commits - 1] for task_id in (*entry.dispatched, *entry.counted)]
        yield f"the counts begin at version {start.version}, from which the run went on without its Redis", _some(early)
    sequences = [entry.sequence for entry in journal]
    yield "every commit is in the journal", _unless(sequences == list(range(1, len(sequences) + 1)), "commits missing")

    dispatched = [task_id for entry in journal for task_id in entry.dispatched]
    counted = [task_id for entry in journal for task_id in entry.counted]
    yield "each task was dispatched once", _twice(dispatched)
    yield "each task was counted once", _twice(counted)
    yield "what was dispatched was counted, or is outstanding", _differ(dispatched, [*counted, *books.outstanding])
    yield "nothing is outstanding", _some(books.outstanding)
    yield (
        "the counters are those of the journal",
        _unless(
            counters.get("dispatched") == start.dispatched + len(dispatched),
            f"{counters.get('dispatched')} dispatched, not {start.dispatched + len(dispatched)}",
        ),
    )

    numbers = [number for entry in journal for number, _ in entry.batches]
    batched = [sample_id for entry in journal for _, sample_ids in entry.batches for sample_id in sample_ids]
    discarded = [sample_id for entry in journal for sample_id in entry.discarded]
    expected = list(range(start.version, start.version + len(numbers)))
    yield f"batches are numbered from {start.version}", _unless(numbers == expected, f"they are {numbers[:9]}...")
    yield "no sample is in two batches", _twice(batched)
    yield "no sample was trained on and discarded", _some(set(batched) & set(discarded))
    yield "each sample of a batch was counted before", _some(set(batched) - set(counted))
    rewards = sum(len(entry.rewards) for entry in journal)
    yield (
        "each reward is of a sample in a batch, or discarded",
        _unless(
            rewards == len(batched) + len(set(discarded)), f"{rewards} rewards, {len(batched)} + {len(set(discarded))}"
        ),
    )
    yield "the learner applied each batch once", _applied(books.steps, steps)
    yield "the tracker is that of a replay, bit for bit", _replayed(books, start, tracker)
    yield "Redis holds nothing without an owner", _some(books.leftovers)


def _replayed(books: Books, start: Start, tracker: ValueTracker) -> str:
    prompts = np.array([tracker.index[prompt_id] for prompt_id in start.rows], np.int64)
    tracker.restore_rows(prompts, tracker_rows(start.rows.values()))
    if tracker.population is not None and start.population is not None:
        tracker.population.unpack(start.population)
    for entry in books.journal:
        for prompt_id, reward, rho in entry.rewards:
            tracker.update(prompt_id, reward, rho=rho)
    answered = {prompt_id for prompt_id, visits in zip(tracker.prompt_ids, tracker.visits, strict=True) if visits}
    wrong = sorted(answered ^ set(books.values))
    for prompt_id in sorted(answered & set(books.values)):
        (row,), ours = tracker_rows([books.values[prompt_id]]).tolist(), tracker.row(tracker.index[prompt_id])
        if row[:4] != (ours.alpha, ours.beta, ours.prior, ours.visits):
            wrong.append(prompt_id)
    if wrong:
        return f"{len(wrong)} prompts differ: {', '.join(wrong[:SHOWN])}"
    if tracker.population is not None and tracker.population.pack() != books.population:
        return "the prior differs"
    return ""


def _applied(announced: Sequence[tuple[int, bool]], steps: int) -> str:
    """Versions follow one another from each start. An announcement whose reply was lost is made twice."""
    version: int | None = None
    for number, is_start in announced:
        if not is_start and number != version and (version is None or number != version + 1):
            return f"version {number} was announced after {version}"
        version = number
    return _unless(version == steps, f"the last version is {version}, not {steps}")


def _leftovers(broker: Broker) -> Iterator[str]:
    """Keys that are there and not empty. Of each prompt, one answer is kept to measure drift by."""
    prefix = broker.key("")
    prompts = {name.decode() for name in broker.redis.hkeys(broker.key("tracker"))}
    pattern = prefix.replace("{", "\\{").replace("}", "\\}") + "*"
    for raw in broker.redis.scan_iter(pattern, count=1000):
        name = raw.decode().removeprefix(prefix)
        if name in KEPT or name.removeprefix("previous:") in prompts:
            continue
        size = _size(broker, raw)
        if size:
            yield f"{name} ({size})"


def _size(broker: Broker, key: bytes) -> int:
    """Entries of a stream or a hash; 1 for anything else."""
    kind = broker.redis.type(key)
    if kind == b"stream":
        return int(broker.redis.xlen(key))
    return int(broker.redis.hlen(key)) if kind == b"hash" else 1


def _unless(holds: bool, problem: str) -> str:
    return "" if holds else problem


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    return f"{len(listed)}: {', '.join(listed[:SHOWN])}" if listed else ""


def _twice(names: Sequence[str]) -> str:
    return _some(name for name, times in Counter(names).items() if times > 1)


def _differ(left: Sequence[str], right: Sequence[str]) -> str:
    return _some(((Counter(left) - Counter(right)) + (Counter(right) - Counter(left))).keys())


def figures(books: Books) -> dict[str, Any]:
    return {
        "commits": len(books.journal),
        "tasks": sum(len(entry.dispatched) for entry in books.journal),
        "samples trained on": sum(len(ids) for entry in books.journal for _, ids in entry.batches),
        "starts of the learner": sum(is_start for _, is_start in books.steps),
    }
