"""Batches from which nothing can be learned are said once, with answers beside what was expected."""

from __future__ import annotations

from pathlib import Path

from structlog.testing import capture_logs

from common.messages import SampleHeader
from common.payload import pack_record
from common.streams.broker import Broker
from sampler.results import EqualRewards
from tests.support.sampler_driving import LOG, started

EQUAL, MIXED = [0.0, 0.0, 0.0], [0.0, 1.0, 0.0]


def warned(*batches: list[float], answers: int = 0) -> list[str]:
    """The warnings about these batches."""
    with capture_logs() as logs:
        rewards = EqualRewards(LOG)
        for number in range(answers):
            record = pack_record({"output": f"it is\n{number}" + "!" * 100, "gts": 7})
            rewards.add(SampleHeader(task_id="t", prompt_id="p", record=record))
        for batch in batches:
            rewards.batch_closed(batch)
    return [entry["event"] for entry in logs]


def test_equal_rewards_are_said_once_with_three_answers() -> None:
    assert warned(*[EQUAL] * 4, MIXED, *[EQUAL] * 4) == []
    (line,) = warned(*[EQUAL] * 5, MIXED, *[EQUAL] * 9, answers=5)
    assert line.startswith("nothing to learn: in each of the last 5 batches all rewards were equal (now 0); ")
    shown = [f"'it is {number}" for number in range(5)]
    assert [text in line for text in shown] == [False, False, True, True, True]
    assert line.count("(expected '7')") == 3
    assert len(line) < 500
    assert "episode.rollouts_every" in warned(*[EQUAL] * 5)[0]


def test_the_sampler_says_it(fake_broker: Broker, tmp_path: Path) -> None:
    sampler, generator, learner = started(fake_broker, tmp_path, run={"steps": 8})
    with capture_logs() as logs:
        while learner.version < 7:
            sampler.round()
            generator.work(reward=0.5, record=b"no record")
            generator.version += learner.work()
    assert sum("nothing to learn" in entry["event"] for entry in logs) == 1
