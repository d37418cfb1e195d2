"""`spo chaos`: the audit finds whatever is wrong with the counts of a run, and a seed decides the faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from common.config import Config
from common.errors import UserError
from common.streams.broker import Broker
from common.streams.ledger import JournalEntry, SamplerLedger, read_journal
from tests.chaos.audit import Books, read_books
from tests.chaos.schedule import WEIGHTS, schedule
from tests.support.sampler import NoopGenerator, NoopLearner, make_config
from tests.support.sampler_driving import audited, drive, start


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return make_config(tmp_path, prompts=12, heldout=3, sampler={"tracker": {"prior": "population"}})


def run_to_its_end(config: Config, broker: Broker, *, journal: bool = True) -> Books:
    sampler = start(config, broker, SamplerLedger(broker, "sampler under test", journal=journal))
    drive(sampler, NoopGenerator(broker), NoopLearner(broker))
    sampler.snapshots.save(config.run.steps)
    broker.finish()
    return read_books(broker)


def problems(books: Books, config: Config) -> list[str]:
    return [name for name, problem in audited(books, config).items() if problem]


def test_the_counts_of_a_run_balance(config: Config, broker: Broker) -> None:
    assert problems(run_to_its_end(config, broker), config) == []


def sample_of_a_batch(books: Books) -> str:
    return next(sample_ids[0] for entry in books.journal for _, sample_ids in entry.batches)


def changed(books: Books, name: str, change: Callable[[Any], Any]) -> Books:
    """With another value in the newest entry that has one."""
    at = max(i for i, entry in enumerate(books.journal) if getattr(entry, name))
    entry: JournalEntry = books.journal[at]
    journal = [*books.journal]
    journal[at] = replace(entry, **{name: change(getattr(entry, name))})
    return replace(books, journal=journal)


def tampered(name: str, change: Callable[[Any], Any]) -> Callable[[Books], Books]:
    return lambda books: changed(books, name, change)


# What is changed in the counts, and the line of the audit that does not hold then.
TAMPERED: dict[str, tuple[Callable[[Books], Books], str]] = {
    "a commit is gone": (lambda books: replace(books, journal=books.journal[1:]), "every commit is in the journal"),
    "a task twice": (tampered("dispatched", lambda ids: [*ids, ids[0]]), "each task was dispatched once"),
    "a result twice": (tampered("counted", lambda ids: [*ids, ids[0]]), "each task was counted once"),
    "a lost result": (tampered("counted", lambda ids: ids[1:]), "what was dispatched was counted, or is outstanding"),
    "a task without an answer": (lambda books: replace(books, outstanding=["t0000001"]), "nothing is outstanding"),
    "a counter that is off": (
        lambda books: replace(books, counters=books.counters | {"dispatched": 1}),
        "the counters are those of the journal",
    ),
    "a lost batch": (
        tampered("batches", lambda batches: [[batches[0][0] + 1, batches[0][1]]]),
        "batches are numbered from 0",
    ),
    "a sample in two batches": (
        tampered("batches", lambda batches: [[batches[0][0], [batches[0][1][0]] * 8]]),
        "no sample is in two batches",
    ),
    "a sample that was not counted": (
        tampered("batches", lambda batches: [[batches[0][0], ["t9999999", *batches[0][1][1:]]]]),
        "each sample of a batch was counted before",
    ),
    "a sample that is trained on and discarded": (
        lambda books: replace(
            books, journal=[*books.journal[:-1], replace(books.journal[-1], discarded=[sample_of_a_batch(books)])]
        ),
        "no sample was trained on and discarded",
    ),
    "a reward of no sample": (
        tampered("rewards", lambda rewards: [*rewards, rewards[0]]),
        "each reward is of a sample in a batch, or discarded",
    ),
    "a step that was made twice": (
        lambda books: replace(books, steps=[*books.steps[:-1], (books.steps[-1][0] + 1, False)]),
        "the learner applied each batch once",
    ),
    "a step that is missing": (
        lambda books: replace(books, steps=[(0, True), (1, False), (3, False), (6, True)]),
        "the learner applied each batch once",
    ),
    "a value that is off by one bit": (
        tampered("rewards", lambda rewards: [[*rewards[0][:2], rewards[0][2] * (1 + 2**-52)], *rewards[1:]]),
        "the tracker is that of a replay, bit for bit",
    ),
    "a payload without a reader": (
        lambda books: replace(books, leftovers=["payload:t0000001 (1)"]),
        "Redis holds nothing without an owner",
    ),
}


@pytest.mark.parametrize("name", TAMPERED)
def test_what_is_wrong_with_them_is_found(config: Config, fake_broker: Broker, name: str) -> None:
    tamper, line = TAMPERED[name]
    assert line in problems(tamper(run_to_its_end(config, fake_broker)), config)


def test_keys_that_nobody_owns_are_named(config: Config, fake_broker: Broker) -> None:
    assert run_to_its_end(config, fake_broker, journal=False).journal == []
    fake_broker.redis.set(fake_broker.key("payload:t0000001"), b"tokens")
    fake_broker.redis.xadd(fake_broker.key("tasks"), {"id": "t0000002"})
    assert read_books(fake_broker).leftovers == ["payload:t0000001 (1)", "tasks (1)"]


def test_a_long_journal_is_read_whole_and_in_order(fake_broker: Broker) -> None:
    for sequence in range(1, 1203):
        entry = JournalEntry(sequence, [("a", 0.1, 0.9)], [f"t{sequence}"], [], [(0, ["x"])], [])
        fake_broker.redis.xadd(fake_broker.key("journal"), {"commit": entry.pack()})
    assert [entry.sequence for entry in read_journal(fake_broker)] == list(range(1, 1203))


def test_a_seed_decides_the_faults_of_which_some_can_be_left_out() -> None:
    first, again, other = ([*islice(schedule(seed), 50)] for seed in (3, 3, 4))
    assert first == again != other
    assert sorted(fault.kind for fault in islice(schedule(0), len(WEIGHTS))) == sorted(WEIGHTS)
    assert {fault.kind for fault in islice(schedule(0, ["kill redis"]), 300)} == set(WEIGHTS) - {"kill redis"}
    with pytest.raises(UserError, match="no fault: 'kill radish'"):
        schedule(0, ["kill radish"])
    with pytest.raises(UserError, match="no fault"):
        schedule(0, [*WEIGHTS])
