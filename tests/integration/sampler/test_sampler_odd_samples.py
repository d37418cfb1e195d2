"""Samples that are late, without a reward, out of range or of nobody."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import UserError
from common.messages import SampleHeader
from common.streams.broker import Broker
from tests.support.sampler import replayed
from tests.support.sampler_driving import committed_counts, drive, each_task_once, reach, start, started

pytestmark = pytest.mark.integration


def test_what_is_set_aside_is_replaced_and_retired_prompts_do_not_come_back(broker: Broker, tmp_path: Path) -> None:
    sampler, generator, learner = started(broker, tmp_path, heldout=2)
    sampler.round()
    sampler.round()
    generator.work(4, status="set_aside", reason="sandbox failed")
    generator.work(3, status="set_aside", reason="too long", retire=True)
    retired = {header.prompt_id for header in generator.headers[4:7]}
    assert len(retired) == 3
    seen = len(generator.headers)
    in_flight = set(sampler.state.admission.in_flight)
    drive(sampler, generator, learner)
    counters = broker.counters()
    assert counters["dispatched"] == counters["counted"]
    assert (counters["set_aside"], counters["retired"]) == (5, 3), "two of the seven were held-out answers"
    assert counters["rewarded"] == 48
    later = [header for header in generator.headers[seen:] if header.task_id not in in_flight]
    assert not retired.intersection(header.prompt_id for header in later)
    assert broker.evaluations()[0]["set_aside"] == 2
    assert broker.evaluations()[0]["samples"] == 0
    again = start(sampler.config, broker)
    assert {again.state.tracker.prompt_ids[i] for i in again.state.tracker.retired.nonzero()[0]} == retired


def test_a_late_sample_informs_the_tracker_and_another_takes_its_place(broker: Broker, tmp_path: Path) -> None:
    sampler, generator, learner = started(broker, tmp_path)
    reach(sampler, generator, learner, 3)
    sampler.round()
    generator.work(1, oldest_version=0)
    late = generator.headers[-1]
    drive(sampler, generator, learner)
    assert broker.counters()["late"] == 1
    assert broker.counters()["rewarded"] == 49
    assert late.task_id not in [sample_id for batch in learner.batches for sample_id in batch.sample_ids]
    each_task_once(broker, generator, learner, sampler.config)
    assert committed_counts(broker) == replayed(sampler.config, sampler.prompts.ids, generator.headers, 6)


def test_a_run_whose_rewards_are_all_outside_the_declared_range_stops_with_one_line(
    broker: Broker, tmp_path: Path
) -> None:
    sampler, generator, _ = started(broker, tmp_path, sampler={"max_set_aside": 3})
    sampler.round()
    generator.work(4, reward=7.0)
    with pytest.raises(UserError, match=r"reward 7.0 is outside sampler.tracker.reward_range \[0.0, 1.0\]"):
        sampler.round()


def test_no_prompt_that_can_be_answered_is_one_clear_line(broker: Broker, tmp_path: Path) -> None:
    sampler, generator, _ = started(broker, tmp_path, prompts=2, sampler={"batch_size": 2})
    sampler.round()
    generator.work(4, status="set_aside", reason="prompt has 99 tokens", retire=True)
    with pytest.raises(UserError, match=r"no prompt of .*train.jsonl can be answered; .*99 tokens"):
        sampler.round()


def test_headers_of_unknown_tasks_are_acknowledged_and_change_nothing(broker: Broker, tmp_path: Path) -> None:
    sampler, generator, learner = started(broker, tmp_path)
    for kind in ("values", "train"):
        header = SampleHeader(task_id=f"stranger-{kind}", prompt_id=sampler.prompts.ids[0], kind=kind, reward=1.0)
        broker.redis.xadd(broker.key("samples"), {"id": header.task_id, "header": header.pack()})
    broker.redis.xadd(broker.key("samples"), {"header": b"rubbish"})
    drive(sampler, generator, learner)
    assert broker.counters()["ignored"] == 2
    assert broker.counters()["dead"] == 1
    assert committed_counts(broker) == replayed(sampler.config, sampler.prompts.ids, generator.headers, 6)
