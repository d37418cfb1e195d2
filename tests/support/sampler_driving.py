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
