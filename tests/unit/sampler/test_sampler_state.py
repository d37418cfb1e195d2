"""The sampler's state: what is restored is what was committed, whole."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.config import Config
from common.messages import SampleHeader, Task
from common.streams.broker import Broker
from common.streams.ledger import SamplerLedger
from common.streams.tasks import TaskInbox
from sampler.advantages import normalize_turns
from sampler.records import TRACKER_ROWS, DispatchedTask, OpenSample, packed_rows, tracker_rows
from sampler.state import BEFORE_FIRST_STEP, SamplerState
from tests.support.sampler import make_config
from tests.support.streams import finished

PROMPTS = ["a", "b", "c"]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return make_config(tmp_path, sampler={"batch_size": 2, "max_staleness": 4})


def sample(n: int) -> OpenSample:
    turns = {"turn_advantages": [n - 0.5, -n / 3], "turn_tokens": [4, 2], "row_tokens": [7, 3]}
    return OpenSample(f"t{n}", n, n - 0.5, 1.0, 10, 6, oldest_version=2, counted_at=3, **turns)


def summary(state: SamplerState) -> dict[str, object]:
    return {
        "position": (state.version, state.open.next_id, state.next_task, state.arrivals, state.last_step),
        "values": [(state.tracker.row(i), state.drift.answered.item(i)) for i in range(len(PROMPTS))],
        "drift": state.drift.by_version().tolist(),
        "population": state.tracker.population.pack() if state.tracker.population else None,
        "open": list(state.open.samples()),
        "in_flight": state.admission.in_flight,
        "evaluations": state.evaluations,
    }


class Ledger:
    """A run's ledger, and a state that goes on from it."""

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
def run(config: Config, fake_broker: Broker) -> Ledger:
    return Ledger(config, fake_broker)


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
    assert state.update_value(0, header)[0] == 0.5
    state.retire(1)
    state.add_sample(sample(0))
    run.commit()

    successor = run.successor()
    for each in (successor, state):
        each.add_sample(sample(1))
    assert successor.close_batch().manifest.turn_advantages == normalize_turns([[-0.5, 0.0], [0.5, -1 / 3]])
    assert state.close_batch().manifest.sample_ids == ["t0", "t1"]
    run.commit()
    assert broker.redis.hlen(broker.key("open")) == 0


def test_what_was_not_committed_never_happened(run: Ledger) -> None:
    run.state.record_step(0, 0.0)
    run.commit()
    before = summary(run.state)
    run.state.record_step(1, 0.5)
    run.state.update_value(0, SampleHeader(task_id="t0", prompt_id="a", reward=1.0))
    run.state.add_sample(sample(0))
    assert summary(run.state) != before
    assert summary(run.successor()) == before


@pytest.mark.parametrize(
    ("mode", "drift", "rhos"), [("rescore", 0.006, (0.96, 2**-0.1)), ("constant", 0.5, (0.7, 0.7))]
)
def test_measured_drift_or_a_constant_rho_reach_the_tracker(
    tmp_path: Path, mode: str, drift: float, rhos: tuple[float, float]
) -> None:
    state = SamplerState(make_config(tmp_path, sampler={"drift": {"mode": mode, "rho": 0.7}}), PROMPTS)
    for measured in (None, drift):
        state.update_value(0, SampleHeader(task_id="t", prompt_id="a", reward=1.0, drift=measured))
    assert state.tracker.counts("a")[0] == pytest.approx(rhos[1] * (rhos[0] * 0.5 + 1) + 1)


@settings(max_examples=10)
@given(st.floats(0, 30), st.floats(0, 30), st.integers(-1, 2**40), st.booleans(), st.text(max_size=20))
def test_packed_state_comes_back_whole(alpha: float, beta: float, version: int, flag: bool, name: str) -> None:
    rows = np.array([(alpha, beta, alpha / 2, 3, version, flag)] * 2, TRACKER_ROWS)
    packed = list(packed_rows(rows))
    assert packed == [struct.pack("<dddqq?", alpha, beta, alpha / 2, 3, version, flag)] * 2
    assert tracker_rows(packed).tolist() == rows.tolist()
    task = DispatchedTask(name, flag, version, alpha)
    assert DispatchedTask.unpack(task.pack()) == task
    waiting = OpenSample(name, 1, alpha, beta, 2, 3, version, 4, group=name)
    assert OpenSample.unpack(waiting.pack()) == waiting
