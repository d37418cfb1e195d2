"""The sampler's state: what is restored is what was committed, whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.config import Config
from common.messages import SampleHeader, Task
from common.streams.broker import Broker
from common.streams.ledger import SamplerLedger
from common.streams.tasks import Finished, TaskInbox
from sampler.advantages import normalize_turns
from sampler.records import DispatchedTask, OpenSample
from sampler.state import BEFORE_FIRST_STEP, SamplerState
from tests.support.sampler import make_config

PROMPTS = ["a", "b", "c"]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return make_config(tmp_path, sampler={"batch_size": 2, "max_staleness": 4})


def sample(n: int) -> OpenSample:
    turns = {"turn_advantages": [n - 0.5, -n / 3], "turn_tokens": [4, 2]}
    return OpenSample(f"t{n}", n, n - 0.5, 1.0, 10, 6, oldest_version=2, counted_at=3, **turns)


def commit(state: SamplerState, ledger: SamplerLedger) -> None:
    ledger.commit(state.take_commit())
    assert not state.has_changed()


def restored(config: Config, broker: Broker) -> SamplerState:
    state = SamplerState(config, PROMPTS)
    assert state.restore(SamplerLedger(broker, "sampler").acquire())
    return state


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


def test_a_successor_restores_all_that_was_committed(config: Config, fake_broker: Broker) -> None:
    ledger, state = SamplerLedger(fake_broker, "sampler"), SamplerState(config, PROMPTS)
    state.restore(ledger.acquire())
    state.record_step(3, 0.25)
    state.last_step = "7-0"
    state.start_evaluation(3, expected=4)
    for n in range(2):
        task = Task(task_id=f"t{n}", prompt_id="a", prompt="?")
        state.dispatch(task, DispatchedTask("a", False, 3, 0.5))
    commit(state, ledger)
    assert summary(restored(config, fake_broker)) == summary(state)

    inbox = TaskInbox(fake_broker, "g")
    (delivery,) = inbox.take(1, block_ms=0)
    inbox.finish([Finished(delivery.entry_id, SampleHeader(task_id="t0", prompt_id="a", reward=1.0))])
    ((entry_id, header),) = ledger.read(block_ms=0)
    assert state.acknowledge(entry_id, header.task_id) is not None
    value, _, _ = state.update_value(0, header)
    assert value == 0.5
    state.retire(1)
    state.add_sample(sample(0))
    commit(state, ledger)
    assert summary(restored(config, fake_broker)) == summary(state)

    successor = restored(config, fake_broker)
    successor.add_sample(sample(1))
    state.add_sample(sample(1))
    assert successor.close_batch().manifest.turn_advantages == normalize_turns([[-0.5, 0.0], [0.5, -1 / 3]])
    assert state.close_batch().manifest.sample_ids == ["t0", "t1"]
    commit(state, ledger)
    assert summary(restored(config, fake_broker)) == summary(state)
    assert fake_broker.redis.hlen(fake_broker.key("open")) == 0


def test_what_was_not_committed_never_happened(config: Config, fake_broker: Broker) -> None:
    ledger, state = SamplerLedger(fake_broker, "sampler"), SamplerState(config, PROMPTS)
    state.restore(ledger.acquire())
    state.record_step(0, 0.0)
    commit(state, ledger)
    before = summary(state)
    state.record_step(1, 0.5)
    state.update_value(0, SampleHeader(task_id="t0", prompt_id="a", reward=1.0))
    state.add_sample(sample(0))
    assert summary(state) != before
    assert summary(restored(config, fake_broker)) == before


def test_a_run_that_has_not_begun_has_nothing_to_restore(config: Config, fake_broker: Broker) -> None:
    state = SamplerState(config, PROMPTS)
    assert not state.restore(SamplerLedger(fake_broker, "sampler").acquire())
    assert state.version == BEFORE_FIRST_STEP
    assert not state.has_changed()
