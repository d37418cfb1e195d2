"""A sampler that gets nothing but tasks set aside stops the run with their reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import UserError
from common.streams.broker import Broker
from tests.support.sampler_driving import drive, start, started

pytestmark = pytest.mark.integration


def test_nothing_but_failures_stop_the_run_with_their_reason_and_it_can_go_on(broker: Broker, tmp_path: Path) -> None:
    sampler_config = {"batch_size": 8, "max_staleness": 1, "max_set_aside": 20}
    sampler, generator, learner = started(broker, tmp_path, heldout=4, sampler=sampler_config)
    sampler.round()
    generator.work(15, status="set_aside", reason="sandbox 127.0.0.1:8080: no result")
    generator.work(1)
    sampler.round()
    assert sampler.failures.in_a_row == 0, "an answer between them"
    sampler.round()
    generator.work(3, status="set_aside", reason="prompt has 99 tokens", retire=True)
    sampler.round()
    assert sampler.failures.in_a_row == 0, "the prompts' own fault"
    generator.work(20, status="set_aside", reason="sandbox 127.0.0.1:8080: no result")
    sampler.round()
    assert sampler.failures.in_a_row <= 20
    generator.work(20, status="set_aside", reason="sandbox 127.0.0.1:8080: no result")
    with pytest.raises(UserError) as stopped:
        sampler.round()
    failed = sampler.failures.in_a_row
    assert failed > 20
    assert str(stopped.value).startswith(f"{failed} tasks in a row were set aside, and none was answered")
    assert "sampler.max_set_aside = 20); the last one: sandbox 127.0.0.1:8080: no result; fix" in str(stopped.value)
    assert broker.counters()["counted"] == 15 + 1 + 3 + failed
    # Mended, and started again.
    drive(start(sampler.config, broker), generator, learner)
    assert broker.counters()["rewarded"] == 48
    assert [result["version"] for result in broker.evaluations()] == [0, 2, 4, 6]


def test_by_default_as_many_may_fail_as_are_outstanding(broker: Broker, tmp_path: Path) -> None:
    sampler, generator, _ = started(broker, tmp_path, sampler={"batch_size": 16, "max_staleness": 4})
    sampler.round()
    generator.work(80, status="set_aside", reason="out of order")
    sampler.round()
    generator.work(1, status="set_aside", reason="out of order")
    with pytest.raises(UserError, match=r"^81 tasks in a row .*max_set_aside = 80\); the last one: out of order"):
        sampler.round()
