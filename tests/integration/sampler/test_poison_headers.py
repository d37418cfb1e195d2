"""Whatever a result says, the run goes on: it is counted, or set aside with its reason, and nothing is left behind."""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path
from typing import Any

import msgpack
import pytest

from common.messages import SampleHeader, Step
from common.streams.broker import Broker
from common.streams.dead import list_dead
from common.streams.tasks import Delivery
from sampler.loop import Sampler
from sampler.metrics import SamplerMetrics
from tests.support.sampler import NoopGenerator, NoopLearner, make_config, reward_of
from tests.support.sampler_driving import drive, start, started

pytestmark = pytest.mark.integration

POISON: dict[str, dict[str, Any]] = {
    "tokens of 64 bits": {"tokens": 2**63},
    "model_tokens of 64 bits": {"model_tokens": 2**64 - 1},
    "a version of 63 bits": {"oldest_version": 2**63, "newest_version": 2**63},
    "a version after the last": {"oldest_version": 0, "newest_version": 2**30},
    "negative versions": {"oldest_version": -1, "newest_version": -1},
    "versions the wrong way around": {"oldest_version": 1, "newest_version": 0},
    "seconds that are no number": {"seconds": math.nan},
    "an infinite time": {"seconds": math.inf},
    "a reward beyond the range": {"reward": 1.5},
    "an enormous reward": {"reward": 1e308},
    "an unknown prompt id": {"prompt_id": "nobody"},
    "a part that is no number": {"reward_parts": {"exact": math.nan}},
    "returns nobody asked for": {"turn_returns": [7.0], "turn_tokens": [3]},
    "turn tokens of 64 bits": {"turn_returns": [0.5], "turn_tokens": [2**63]},
    "another kind": {"kind": "eval"},
    "an enormous drift": {"drift": 1e308},
    "a field too much": {"colour": "red"},
    "a record of rubbish": {"record": "text"},
}


def send(broker: Broker, generator: NoopGenerator, delivery: Delivery, changes: dict[str, Any]) -> None:
    """Finish a task with a header that no process of ours would make."""
    task, id_ = delivery.task, delivery.entry_id.id
    fields: dict[str, Any] = {
        "task_id": task.task_id,
        "prompt_id": task.prompt_id,
        "kind": task.kind,
        "reward": reward_of(task),
        "tokens": 10,
        "model_tokens": 6,
        "oldest_version": task.min_version,
        "newest_version": task.min_version,
    }
    broker.redis.xack(broker.key("tasks"), "generators", id_)
    broker.redis.xdel(broker.key("tasks"), id_)
    broker.redis.set(broker.key(f"payload:{task.task_id}"), b"tokens")
    packed = msgpack.packb(fields | changes)
    broker.redis.xadd(broker.key("samples"), {"id": task.task_id, "header": packed})


@pytest.mark.parametrize("name", POISON)
def test_a_poisoned_header_is_set_aside_and_the_run_ends_as_it_should(
    broker: Broker, tmp_path: Path, name: str
) -> None:
    sampler, generator, learner = started(broker, tmp_path, heldout=2, run={"steps": 2}, episode={"rollouts_every": 1})
    sampler.round()
    deliveries = generator.inbox.take(3)
    for delivery in deliveries:
        send(broker, generator, delivery, POISON[name])
    drive(sampler, generator, learner)
    counters = broker.counters()
    assert counters["dispatched"] == counters["counted"] == len(generator.headers) + 3
    assert counters["set_aside"] == 3
    assert counters["rewarded"] == 16
    assert [letter["stream"] for _, letter in list_dead(broker)] == ["samples"] * 3
    assert all(letter["reason"] for _, letter in list_dead(broker))
    assert broker.redis.keys(broker.key("payload:") + "*") == [], "no payload is left behind"
    lines = [json.loads(line) for path in (tmp_path / "rollouts").rglob("*.jsonl") for line in path.open()]
    assert lines == [] or sum(line["status"] == "set_aside" for line in lines) == 3


def test_a_reward_that_rounding_carried_over_the_end_is_the_full_reward(broker: Broker, tmp_path: Path) -> None:
    sampler, generator, learner = started(broker, tmp_path, heldout=2, run={"steps": 2}, eval={"before_training": True})
    sampler.round()
    generator.work(4, reward=1.0000000000000002)
    generator.work(4, reward=0.9999999999999999)
    drive(sampler, generator, learner)
    assert "set_aside" not in broker.counters()
    assert max(reward for batch in learner.batches for reward in batch.rewards) == 1.0
    assert broker.evaluations()[0]["accuracy"] == 1.0


def test_what_counting_cannot_do_with_a_result_stops_nothing(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = SamplerMetrics.add

    def fails_once(metrics: SamplerMetrics, header: SampleHeader, *values: Any, **named: Any) -> None:
        if header.task_id == "t0000003":
            raise OverflowError("what nobody thought of")
        add(metrics, header, *values, **named)

    monkeypatch.setattr(SamplerMetrics, "add", fails_once)
    config = make_config(tmp_path, run={"steps": 2})
    generator, learner = NoopGenerator(broker), NoopLearner(broker)
    drive(start(config, broker), generator, learner)
    counters = broker.counters()
    assert counters["dispatched"] == counters["counted"] == len(generator.headers)
    assert (counters["set_aside"], counters["rewarded"]) == (1, 16)
    ((_, letter),) = list_dead(broker)
    assert letter["reason"] == "OverflowError: what nobody thought of"
    assert SampleHeader.unpack(letter["fields"][b"header"]).task_id == "t0000003"
    assert broker.redis.keys(broker.key("payload:") + "*") == []


def test_a_step_beyond_the_last_is_ignored(broker: Broker, tmp_path: Path) -> None:
    config = make_config(tmp_path, run={"steps": 2})
    generator, learner = NoopGenerator(broker), NoopLearner(broker)
    sampler: Sampler = start(config, broker)
    learner.inbox.announce(Step(version=2**30, drift=1.0))
    broker.redis.xadd(broker.key("steps"), {"step": b"rubbish"})
    drive(sampler, generator, learner)
    assert broker.counters()["rewarded"] == 16


@pytest.mark.parametrize("line", [b'{"task_id": "e0-1", "reward": 1.0}', b'{"a": }', b'{"a": ' + b"[" * 9000 + b"}"])
def test_a_record_cannot_speak_for_its_header(broker: Broker, tmp_path: Path, line: bytes) -> None:
    sampler, generator, learner = started(broker, tmp_path, heldout=2, run={"steps": 2}, eval={"before_training": True})
    sampler.round()
    generator.work(2, reward=0.0, record=zlib.compress(line))
    drive(sampler, generator, learner)
    path = next(tmp_path.rglob("validation_data/0.jsonl"))
    rows = [json.loads(text) for text in path.read_text().splitlines()]
    assert [(row["task_id"], row["reward"]) for row in rows] == [("e0-0", 0.0), ("e0-1", 0.0)]
    assert all("record: " in row["left_out"][0] for row in rows)
