"""The sampler's state is restored as it was committed, whole; tasks that Redis has lost are sent again."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.config import Config
from common.messages import Failure, SampleHeader, Task
from common.streams import dead
from common.streams.broker import Broker
from common.streams.early_stop import EarlyStop
from common.streams.ledger import SamplerLedger
from common.streams.tasks import Finished, TaskInbox
from sampler import lost_tasks
from sampler.advantages import normalize
from sampler.files.snapshots import pack_counts, restore_counts
from sampler.records import TRACKER_ROWS, DispatchedTask, OpenSample, packed_rows, tracker_rows
from sampler.state import BEFORE_FIRST_STEP, SamplerState
from tests.support.sampler import NoopGenerator, NoopLearner, make_config
from tests.support.sampler_driving import audited, drive, start, started, summary
from tests.support.streams import finished, payload

PROMPTS = ["a", "b", "c"]


def sample(n: int) -> OpenSample:
    turns = {"turn_returns": [n - 0.5, -n / 3], "turn_tokens": [4, 2], "row_tokens": [7, 3]}
    return OpenSample(f"t{n}", n, 0.0, 1.0, 10, 6, oldest_version=2, counted_at=3, **turns)


class Ledger:
    def __init__(self, config: Config, broker: Broker) -> None:
        self.config, self.broker = config, broker
        self.ledger, self.state = SamplerLedger(broker, "sampler"), SamplerState(config, PROMPTS)
        assert not self.state.restore(self.ledger.acquire()), "the run has not begun"
        assert self.state.version == BEFORE_FIRST_STEP
        assert not self.state.has_changed()

    def commit(self) -> None:
        """Commit; a successor finds the same."""
        self.ledger.commit(self.state.take_commit())
        assert not self.state.has_changed()
        assert summary(self.successor()) == summary(self.state)

    def successor(self) -> SamplerState:
        state = SamplerState(self.config, PROMPTS)
        assert state.restore(SamplerLedger(self.broker, "sampler").acquire())
        return state


@pytest.fixture
def run(tmp_path: Path, broker: Broker) -> Ledger:
    return Ledger(make_config(tmp_path, sampler={"batch_size": 2, "max_staleness": 4}), broker)


def test_a_successor_restores_all_that_was_committed(run: Ledger) -> None:
    state, broker = run.state, run.broker
    state.record_step(3, 0.25)
    state.record_step(2, 0.5)
    assert (state.version, state.open.next_id) == (3, 3), "a learner that came back repeats versions"
    state.last_step = "7-0"
    state.start_evaluation(3, expected=4)
    for n in range(2):
        task = Task(task_id=f"t{n}", prompt_id="a", prompt="?")
        state.dispatch(task, DispatchedTask("a", False, 3, 0.5))
    run.commit()

    inbox = TaskInbox(broker, "g")
    inbox.finish([finished(delivery) for delivery in inbox.take(1, block_ms=0)])
    ((entry_id, header),) = run.ledger.read(block_ms=0)
    assert state.acknowledge(entry_id, header.task_id) is not None
    assert state.update_value(0, header).value_mean == 0.5
    state.retire(1)
    state.add_sample(sample(0))
    run.commit()

    successor = run.successor()
    for each in (successor, state):
        each.add_sample(sample(1))
    first, second = successor.close_batch().manifest.turn_advantages or []
    assert [*first, *second] == normalize(np.array([-0.5, 0.0, 0.5, -1 / 3])).tolist()
    assert state.close_batch().manifest.sample_ids == ["t0", "t1"]
    run.commit()
    assert broker.redis.hlen(broker.key("open")) == 0


@pytest.mark.parametrize(
    ("run", "best", "last"),
    [({}, 0.8, 9), ({"stop_when": 4}, 0.8, 20), ({"stop_when": None}, 0.8, 20), ({"name": "a-fork"}, math.nan, 20)],
)
def test_a_snapshot_holds_its_own_runs_early_end(tmp_path: Path, run: dict[str, Any], best: float, last: int) -> None:
    def state_of(**run: Any) -> tuple[Config, SamplerState]:
        config = make_config(tmp_path, heldout=1, run={"steps": 20, "stop_when": 3} | run)
        return config, SamplerState(config, PROMPTS)

    _, state = state_of()
    state.early_stop = EarlyStop(0.8, 3, since=3, end=9)
    config, restored = state_of(**run)
    restore_counts(restored, pack_counts(state, {}, {}, "test"), config)
    assert (restored.early_stop.best, restored.last_version) == (pytest.approx(best, nan_ok=True), last)


def test_what_was_not_committed_never_happened(run: Ledger) -> None:
    run.state.record_step(0, 0.0)
    run.commit()
    before = summary(run.state)
    run.state.record_step(1, 0.5)
    run.state.update_value(0, SampleHeader(task_id="t0", prompt_id="a", reward=1.0))
    run.state.add_sample(sample(0))
    assert summary(run.state) != before
    assert summary(run.successor()) == before


@pytest.mark.parametrize(("mode", "drift", "rho"), [("rescore", 0.006, [0.96, 2**-0.1]), ("constant", 0.5, [0.7, 0.7])])
def test_drift_or_a_constant_rho_reach_the_tracker(tmp_path: Path, mode: str, drift: float, rho: list[float]) -> None:
    state = SamplerState(make_config(tmp_path, sampler={"drift": {"mode": mode, "rho": 0.7}}), PROMPTS)
    visits = [
        state.update_value(0, SampleHeader(task_id="t", prompt_id="a", reward=1.0, drift=measured))
        for measured in (None, drift)
    ]
    assert [visit.rho_mean for visit in visits] == pytest.approx(rho)
    assert [visit.rho_clip_ratio for visit in visits] == ([1, 0] if mode == "rescore" else [0, 0])
    assert [visit.first_sampled_ratio for visit in visits] == [1, 0]
    assert state.tracker.counts("a")[0] == pytest.approx(rho[1] * (rho[0] * 0.5 + 1) + 1)


@settings(max_examples=10)
@given(st.floats(0, 30), st.floats(0, 30), st.integers(-1, 2**40), st.booleans(), st.text("ab é", max_size=20))
def test_packed_state_comes_back_whole(alpha: float, beta: float, version: int, flag: bool, name: str) -> None:
    rows = np.array([(alpha, beta, alpha / 2, 3, version, flag)] * 2, TRACKER_ROWS)
    packed = list(packed_rows(rows))
    assert packed == [struct.pack("<dddqq?", alpha, beta, alpha / 2, 3, version, flag)] * 2
    assert tracker_rows(packed).tolist() == rows.tolist()
    task = DispatchedTask(name, flag, version, alpha)
    assert DispatchedTask.unpack(task.pack()) == task
    waiting = OpenSample(name, 1, alpha, beta, 2, 3, version, 4, group=name)
    assert OpenSample.unpack(waiting.pack()) == waiting


@pytest.fixture(autouse=True)
def _check_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_tasks, "EVERY", 0.0)
    monkeypatch.setattr(lost_tasks, "SLICE", 3)


def test_a_run_ends_although_tasks_vanish_from_redis(broker: Broker, tmp_path: Path) -> None:
    sampler, generator, learner = started(broker, tmp_path, heldout=6)
    vanished = 0
    for stream in (broker.key("tasks"), broker.key("tasks:e0")):
        vanished += broker.redis.xdel(stream, *(entry_id for entry_id, _ in broker.redis.xrange(stream)[1:4]))
    assert vanished == 6
    drive(sampler, generator, learner)
    assert audited(broker, sampler.config)["sent_again"] == 6


def test_a_lost_task_whose_prompt_has_left_the_data_ends_once(broker: Broker, tmp_path: Path) -> None:
    sampler, generator, learner = started(broker, tmp_path)
    ((entry_id, fields),) = broker.redis.xrange(broker.key("tasks"), count=1)
    broker.redis.xdel(broker.key("tasks"), entry_id)
    gone, data = Task.unpack(fields[b"task"]), tmp_path / "train.jsonl"
    rows = data.read_text().splitlines(keepends=True)
    data.write_text("".join(row for row in rows if json.loads(row)["prompt"] != gone.prompt))
    drive(start(sampler.config, broker, sampler.ledger), generator, learner)
    assert audited(broker, sampler.config)["set_aside"] == 1


def test_a_lost_task_is_not_brought_back_by_its_generator(broker: Broker, tmp_path: Path) -> None:
    sampler, generator, learner = started(broker, tmp_path)
    inbox = TaskInbox(broker, "g")
    (held,) = inbox.take(1, 0)
    broker.redis.xdel(broker.key("tasks"), held.entry_id.id)
    while "sent_again" not in broker.counters():
        sampler.round()
    inbox.requeue([held])
    drive(sampler, generator, learner)
    audited(broker, sampler.config)


def test_tasks_that_are_somewhere_are_not_sent_again(broker: Broker, tmp_path: Path) -> None:
    sampler = start(make_config(tmp_path), broker)
    learner = NoopLearner(broker)
    sampler.round()
    inbox = TaskInbox(broker, "g")
    taken = inbox.take(6, 0)
    inbox.requeue(taken[:2])
    NoopGenerator(broker, "other").finish(taken[2:4])
    for _ in range(20):
        sampler.round()
    assert learner.version == 0
    assert "sent_again" not in broker.counters()


def test_a_run_ends_although_a_result_came_under_a_wrong_id(broker: Broker, tmp_path: Path) -> None:
    sampler, generator, learner = started(broker, tmp_path)
    first, second = generator.inbox.take(2, 0)
    generator.finish([second])
    wrong = generator.headers.pop()
    generator.inbox.finish([Finished(first.entry_id, wrong, payload())])
    generator.headers.append(wrong.model_copy(update={"status": "set_aside"}))
    generator.headers.append(wrong)
    drive(sampler, generator, learner)
    assert audited(broker, sampler.config)["set_aside"] == 1


def test_replaying_a_dead_letter_leaves_no_payload_behind(broker: Broker, tmp_path: Path) -> None:
    sampler, generator, learner = started(broker, tmp_path)
    (delivery,) = generator.inbox.take(1, 0)
    generator.inbox.finish([generator.inbox.set_aside(delivery, Failure.ENGINE_FAILED, "the engine failed")])
    sampler.round()
    ((letter, _),) = dead.list_dead(broker)
    dead.replay(broker, letter)
    drive(sampler, generator, learner)
    assert audited(broker, sampler.config)["ignored"] == 1


def test_streams_are_searched_in_the_order_in_which_tasks_pass_them() -> None:
    searched: list[str] = []

    def task_ids(stream: str, after: str, count: int) -> tuple[str, list[str]]:
        searched.append(stream)
        return "", []

    search = lost_tasks.LostTasks(SimpleNamespace(task_ids=task_ids))  # type: ignore[arg-type]
    for _ in range(3):
        search.search({"t0"}, "e0")
    assert searched == ["tasks", "tasks:e0", "samples"]
