"""Whatever a result says, it is counted, or skipped with its reason; a run with nothing else ends with that reason."""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path
from typing import Any

import msgpack
import pytest

from common.errors import UserError
from common.messages import Failure, SampleHeader, Step
from common.streams.broker import Broker
from common.streams.dead import list_dead
from common.streams.tasks import Delivery
from sampler.metrics import SamplerMetrics
from tests.support.sampler import NoopGenerator, replayed, reward_of
from tests.support.sampler_driving import committed_counts, drive, reach, start, started

POISON: dict[str, dict[str, Any]] = {
    "tokens of 64 bits": {"tokens": 2**63},
    "a version after the last": {"oldest_version": 0, "newest_version": 2**30},
    "negative versions": {"oldest_version": -1, "newest_version": -1},
    "versions the wrong way around": {"oldest_version": 1, "newest_version": 0},
    "seconds that are no number": {"seconds": math.nan},
    "a reward beyond the range": {"reward": 1.5},
    "an unknown prompt id": {"prompt_id": "nobody"},
    "a part that is no number": {"reward_parts": {"exact": math.nan}},
    "returns that were not asked for": {"turn_returns": [7.0], "turn_tokens": [3]},
    "rows of other tokens": {"row_tokens": [5, 6]},
    "a row without tokens": {"row_tokens": [10, 0]},
    "another kind": {"kind": "eval"},
    "a field too much": {"colour": "red"},
    "a record of rubbish": {"record": "text"},
}


def send(broker: Broker, delivery: Delivery, changes: dict[str, Any]) -> None:
    """Finish a task with a header that no process of ours would make."""
    task, key = delivery.task, broker.key
    fields = {
        "task_id": task.task_id, "prompt_id": task.prompt_id, "kind": task.kind, "reward": reward_of(task),
        "tokens": 10, "model_tokens": 6, "oldest_version": task.min_version, "newest_version": task.min_version,
    }  # fmt: skip
    broker.redis.xack(key("tasks"), "generators", delivery.entry_id.id)
    broker.redis.xdel(key("tasks"), delivery.entry_id.id)
    broker.redis.set(key(f"payload:{task.task_id}"), b"tokens")
    broker.redis.xadd(key("samples"), {"id": task.task_id, "header": msgpack.packb(fields | changes)})


def nothing_is_left(broker: Broker, generator: NoopGenerator, skipped: int, rewarded: int, more: int = 0) -> None:
    counters = broker.counters()
    assert counters["dispatched"] == counters["counted"] == len(generator.headers) + more
    assert (counters["set_aside"], counters["rewarded"]) == (skipped, rewarded)
    assert broker.redis.keys(broker.key("payload:") + "*") == []


def test_poisoned_headers_are_skipped_and_the_run_ends(broker: Broker, tmp_path: Path) -> None:
    n = len(POISON)
    sections = {"run": {"steps": 2}, "sampler": {"batch_size": n}, "episode": {"rollouts_every": 1}}
    sampler, generator, learner = started(broker, tmp_path, heldout=2, **sections)
    sent = {}
    for delivery, (name, changes) in zip(generator.inbox.take(n), POISON.items(), strict=True):
        sent[delivery.task.task_id] = name
        send(broker, delivery, changes)
    # Steps of no use beside them.
    learner.inbox.announce(Step(version=2**30, drift=1.0))
    broker.redis.xadd(broker.key("steps"), {"step": b"rubbish"})
    drive(sampler, generator, learner)
    nothing_is_left(broker, generator, n, 2 * n, more=n)
    counters = broker.counters()
    assert counters["set_aside.InvalidMessage"] + counters["set_aside.InvalidResult"] == n
    letters = [letter for _, letter in list_dead(broker)]
    assert {sent[letter["fields"][b"id"].decode()] for letter in letters} == set(POISON)
    assert all(letter["stream"] == "samples" and letter["reason"] for letter in letters)
    lines = [json.loads(line) for path in (tmp_path / "default/rollouts").iterdir() for line in path.open()]
    assert sum(line["status"] == "set_aside" for line in lines) == n


def test_a_reward_rounded_over_the_end_is_the_full_reward(broker: Broker, tmp_path: Path) -> None:
    sampler, generator, learner = started(broker, tmp_path, heldout=2, run={"steps": 2})
    generator.work(4, reward=1.0000000000000002)
    generator.work(4, reward=0.9999999999999999)
    drive(sampler, generator, learner)
    assert "set_aside" not in broker.counters()
    assert max(reward for batch in learner.batches for reward in batch.rewards) == 1.0
    assert broker.evaluations()[0]["accuracy"] == 1.0


def test_an_uncountable_result_stops_nothing(broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add = SamplerMetrics.add

    def fails_once(metrics: SamplerMetrics, header: SampleHeader, *values: Any, **named: Any) -> None:
        if header.task_id == "t0000003":
            raise OverflowError("not foreseen")
        add(metrics, header, *values, **named)

    monkeypatch.setattr(SamplerMetrics, "add", fails_once)
    sampler, generator, learner = started(broker, tmp_path, run={"steps": 2})
    drive(sampler, generator, learner)
    nothing_is_left(broker, generator, 1, 16)
    ((_, letter),) = list_dead(broker)
    assert letter["reason"] == "OverflowError: not foreseen"
    assert SampleHeader.unpack(letter["fields"][b"header"]).task_id == "t0000003"


@pytest.mark.parametrize("line", [b'{"task_id": "e0-1", "reward": 1.0}', b'{"a": ' + b"[" * 9000 + b"}"])
def test_a_record_cannot_speak_for_its_header(broker: Broker, tmp_path: Path, line: bytes) -> None:
    sampler, generator, learner = started(broker, tmp_path, heldout=2, run={"steps": 1})
    generator.work(2, reward=0.0, record=zlib.compress(line))
    drive(sampler, generator, learner)
    text = (tmp_path / "default/validation_data/0.jsonl").read_text()
    rows = [json.loads(row) for row in text.splitlines()]
    assert [(row["task_id"], row["reward"]) for row in rows] == [("e0-0", 0.0), ("e0-1", 0.0)]
    assert all("record: " in row["left_out"][0] for row in rows)


def test_skipped_tasks_are_replaced_retired_prompts_stay_away(broker: Broker, tmp_path: Path) -> None:
    sampler, generator, learner = started(broker, tmp_path, heldout=2)
    sampler.round()
    generator.work(4, status="set_aside", failure=Failure.SANDBOX_UNAVAILABLE, reason="ToolUnavailable: some text")
    generator.work(3, status="set_aside", reason="PromptTooLong: no kind was sent", retire=True)
    retired = {header.prompt_id for header in generator.headers[4:7]}
    assert len(retired) == 3
    in_flight = set(sampler.state.admission.in_flight)
    drive(sampler, generator, learner)
    # Two of the seven were held-out answers.
    nothing_is_left(broker, generator, 5, 48)
    kinds = {name: n for name, n in broker.counters().items() if name.startswith("set_aside.")}
    assert kinds == {"set_aside.SandboxUnavailable": 2, "set_aside.other": 3}
    assert broker.counters()["retired"] == 3
    later = [header for header in generator.headers[7:] if header.task_id not in in_flight]
    assert not retired.intersection(header.prompt_id for header in later)
    assert (broker.evaluations()[0]["set_aside"], broker.evaluations()[0]["samples"]) == (2, 0)
    tracker = start(sampler.config, broker).state.tracker
    assert {tracker.prompt_ids[i] for i in tracker.retired.nonzero()[0]} == retired


def test_a_late_sample_informs_the_tracker_and_is_replaced(broker: Broker, tmp_path: Path) -> None:
    sampler, generator, learner = started(broker, tmp_path)
    # Headers of tasks that were never sent change nothing.
    for kind in ("values", "train"):
        header = SampleHeader(task_id=f"stranger-{kind}", prompt_id=sampler.prompts.ids[0], kind=kind, reward=1.0)
        broker.redis.xadd(broker.key("samples"), {"id": header.task_id, "header": header.pack()})
    broker.redis.xadd(broker.key("samples"), {"header": b"rubbish"})
    reach(sampler, generator, learner, 3)
    sampler.round()
    generator.work(1, oldest_version=0)
    late = generator.headers[-1]
    drive(sampler, generator, learner)
    counters = broker.counters()
    assert [counters[name] for name in ("late", "rewarded", "ignored", "dead")] == [1, 49, 2, 1]
    assert late.task_id not in [sample_id for batch in learner.batches for sample_id in batch.sample_ids]
    assert committed_counts(broker) == replayed(sampler.config, sampler.prompts.ids, generator.headers, 6)


@pytest.mark.parametrize(
    ("sections", "answers", "words"),
    [
        (
            {"sampler": {"max_set_aside": 3}}, {"reward": 7.0},
            r"^4 tasks in a row .*reward 7.0 is outside sampler.tracker.reward_range \[0.0, 1.0\]",
        ),
        (
            {"prompts": 2, "sampler": {"batch_size": 2}},
            {"status": "set_aside", "reason": "prompt has 99 tokens", "retire": True},
            "no prompt of .*train.jsonl can be answered; .*99 tokens",
        ),
    ],
)  # fmt: skip
def test_a_run_without_a_usable_answer_ends_with_one_line(
    broker: Broker, tmp_path: Path, sections: dict[str, Any], answers: dict[str, Any], words: str
) -> None:
    sampler, generator, _ = started(broker, tmp_path, **sections)
    generator.work(4, **answers)
    with pytest.raises(UserError, match=words):
        sampler.round()


@pytest.mark.parametrize(("limit", "allowed"), [(20, 20), (None, 80)])
def test_failures_alone_end_the_run_and_it_can_go_on(broker: Broker, tmp_path: Path, limit: Any, allowed: int) -> None:
    """By default as many may fail as can be outstanding."""
    settings = {"batch_size": 16, "max_staleness": 4, "max_set_aside": limit}
    sampler, generator, learner = started(broker, tmp_path, run={"steps": 6}, sampler=settings)
    failure = {"status": "set_aside", "reason": "sandbox 127.0.0.1:8080: no result"}

    def answered(n: int, **changes: Any) -> int:
        """Failures in a row after `n` more answers."""
        generator.work(n, **changes)
        sampler.round()
        return sampler.failures.in_a_row

    sampler.round()
    assert answered(15, **failure) == 15
    assert answered(1) == 0, "an answer between them"
    assert answered(3, status="set_aside", reason="prompt has 99 tokens", retire=True) == 0, "the prompts' own fault"
    assert sum(answered(20, **failure) > 0 for _ in range(allowed // 20)) == allowed // 20
    with pytest.raises(UserError) as stopped:
        answered(1, **failure)
    assert str(stopped.value).startswith(f"{allowed + 1} tasks in a row were skipped, and none was answered")
    assert f"sampler.max_set_aside = {allowed}); the last one: {failure['reason']}" in str(stopped.value)
    assert broker.counters()["counted"] == 15 + 1 + 3 + allowed + 1
    # Fixed, and started again.
    drive(start(sampler.config, broker), generator, learner)
    assert broker.counters()["batched"] == 6 * 16
