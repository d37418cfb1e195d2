"""Whole runs of a sampler, round by round, and what must hold at their end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import structlog

from common.config import Config
from common.streams.broker import Broker
from common.streams.ledger import SamplerLedger
from common.streams.presence import Presence
from launcher.audit.lines import audit, figures
from launcher.audit.records import RedisRecords, read_redis
from sampler.answers import load_questions
from sampler.files.answer_file import Request
from sampler.loop import Sampler
from sampler.prompts.prompt_set import RunData, load_data
from sampler.records import tracker_rows
from sampler.state import SamplerState
from tests.support.sampler import NoopGenerator, NoopLearner, make_config

LOG = structlog.get_logger()


def start(
    config: Config, broker: Broker, ledger: SamplerLedger | None = None, request: Request | None = None
) -> Sampler:
    ledger = ledger or SamplerLedger(broker, "sampler under test", journal=True)
    data = RunData(load_questions(config, request, LOG), None) if request else load_data(config.data, LOG)
    sampler = Sampler(config, data, ledger, Presence(broker, "sampler", "sampler"), LOG, request)
    sampler.begin()
    return sampler


def started(broker: Broker, folder: Path, **sections: Any) -> tuple[Sampler, NoopGenerator, NoopLearner]:
    """A run of `make_config`, whose first tasks are out."""
    config = make_config(folder, **sections)
    generator, learner = NoopGenerator(broker), NoopLearner(broker, folder=config.run.folder)
    sampler = start(config, broker)
    sampler.round()
    return sampler, generator, learner


def drive(sampler: Sampler, generator: NoopGenerator, learner: NoopLearner, rounds: int = 1000) -> None:
    for _ in range(rounds):
        sampler.round()
        if sampler.over():
            return
        generator.work()
        if learner.work():
            generator.version = learner.version
    raise AssertionError("the run did not end")


def reach(sampler: Sampler, generator: NoopGenerator, learner: NoopLearner, version: int) -> None:
    while learner.version < version:
        sampler.round()
        generator.work()
        if learner.work():
            generator.version = learner.version


def summary(state: SamplerState) -> dict[str, Any]:
    """What a successor must find as it was committed."""
    admission, tracker = state.admission, state.tracker
    rows = range(len(tracker.prompt_ids))
    return {
        "position": (state.version, state.open.next_id, state.next_task, state.arrivals, state.refilled),
        "last step": state.last_step,
        "open": {name: list(samples) for name, samples in state.open.groups.items()},
        "versions": dict(state.open.versions),
        "in flight": dict(admission.in_flight),
        "groups": {name: (group.tasks, group.samples, group.oldest) for name, group in admission.groups.items()},
        "must wait": [admission.must_wait(state.open.next_id + n, state.open.versions) for n in range(4)],
        "counts": (admission.arrived, admission.training),
        "values": [(tracker.row(i), state.drift.answered.item(i)) for i in rows],
        "drift": state.drift.by_version().tolist(),
        "population": tracker.population.pack() if tracker.population else None,
        "evaluations": dict(state.evaluations),
        "early stop": repr(state.early_stop),
    }


def committed_counts(broker: Broker) -> dict[str, tuple[float, float]]:
    rows = broker.redis.hgetall(broker.key("tracker"))
    counts = tracker_rows(rows.values())[["alpha", "beta"]].tolist()
    return {name.decode(): row for name, row in zip(rows, counts, strict=True)}


def audited(broker: Broker, config: Config) -> dict[str, int]:
    """The counters of a journaled run that is over: it lost nothing, counted nothing twice, and left nothing."""
    if not broker.finished():
        broker.finish()
    records = read_redis(broker)
    assert problems(records, config) == {}
    last = records.early_stop.last_version(config.run.steps, config.run.stop_when)
    assert figures(records)["samples trained on"] == last * config.sampler.batch_size
    return records.counters


def problems(records: RedisRecords, config: Config) -> dict[str, str]:
    """The lines of the audit that do not hold, each with what is wrong."""
    return {line.name: line.problem for line in audit(config, records, LOG) if line.problem}
