"""A sampler that was replaced while it stood still writes no episodes: its successor has them already."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.streams.broker import Broker
from common.streams.lease import LeaseLost
from common.streams.ledger import OutOfStep, SamplerLedger
from tests.support.sampler import NoopGenerator, NoopLearner, make_config
from tests.support.sampler_driving import start


@pytest.mark.parametrize("gone_again", [False, True])
def test_lines_of_a_replaced_sampler_reach_no_file(broker: Broker, tmp_path: Path, gone_again: bool) -> None:
    # Without trackers: each sampler would begin TensorBoard's folder anew, in threads that nobody here waits for.
    config = make_config(tmp_path, run={"log_to": []}, episode={"rollouts_every": 1}, heldout=3)
    NoopLearner(broker)
    paused = start(config, broker, SamplerLedger(broker, "paused"))
    paused.round()
    generator = NoopGenerator(broker)
    generator.work(6)
    paused.round()
    generator.work(8)
    headers, steps = paused.read()
    assert headers
    broker.redis.delete(broker.key("lease"))
    ledger = SamplerLedger(broker, "successor")
    successor = start(config, broker, ledger)
    successor.round()
    if gone_again:
        ledger.release()
    paused.read = lambda: (headers, steps)  # type: ignore[method-assign]
    with pytest.raises((LeaseLost, OutOfStep)):
        paused.round()
    for folder in ("rollouts", "validation_data"):
        for path in (config.run.folder / folder).iterdir():
            ids = [json.loads(line)["task_id"] for line in path.read_text().splitlines()]
            assert len(ids) == len(set(ids)), path
