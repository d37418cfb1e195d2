"""An evaluation of any size is sent in slices, so that no commit is too large for Redis."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.streams.broker import Broker
from common.streams.ledger import Commit, SamplerLedger
from tests.support.sampler import NoopGenerator, NoopLearner, make_config
from tests.support.sampler_driving import drive, each_task_once, start

SLICE = 4


def test_tasks_of_an_evaluation_come_in_slices_also_from_a_sampler_that_takes_over(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sampler.evaluation.SLICE", SLICE, raising=False)
    sent: list[int] = []
    commit = SamplerLedger.commit

    def recorded(self: SamplerLedger, changes: Commit) -> int:
        sent.append(sum(task.kind == "eval" for task, _ in changes.dispatch))
        return commit(self, changes)

    monkeypatch.setattr(SamplerLedger, "commit", recorded)
    config = make_config(tmp_path, heldout=30)
    generator, learner = NoopGenerator(broker), NoopLearner(broker)
    start(config, broker).round()
    sampler = start(config, broker)
    for _ in range(40):
        sampler.round()
    assert sum(sent) < 30, "the next slices wait for answers to the first"
    drive(sampler, generator, learner)
    assert max(sent) == SLICE
    each_task_once(broker, generator, learner, config)
    assert {result["samples"] for result in broker.evaluations()} == {30}
