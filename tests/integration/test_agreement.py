"""One configuration a run: who may change what of it, and when."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from common.config import Config, parse_config
from common.config.shared import CHANGEABLE, may_change
from common.errors import UserError
from common.files import METADATA, checkpoint
from common.messages import Step
from common.streams.agreement import agree, changes_of, compare
from common.streams.batches import BatchInbox
from common.streams.broker import Broker
from common.streams.presence import Presence

pytestmark = pytest.mark.integration


class Log:
    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, Any]]] = []

    def warning(self, line: str, **values: Any) -> None:
        self.lines.append((line, values))


def config(**sections: dict[str, Any]) -> Config:
    tree: dict[str, Any] = {
        "model": {"path": "m"},
        "data": {"train": "t"},
        "run": {"steps": 10},
        "broker": {"heartbeat": 0.05},
    }
    for name, values in sections.items():
        tree[name] = tree.get(name, {}) | values
    return parse_config(tree)


def train_to(broker: Broker, version: int) -> None:
    BatchInbox(broker).acquire().announce(Step(version=version))


def test_what_is_local_to_a_machine_may_differ(real_broker: Broker) -> None:
    agree(real_broker, config(), may_differ=False)
    agree(real_broker, config(broker={"url": "redis://elsewhere"}), may_differ=False)


def test_before_the_first_step_any_key_may_change(real_broker: Broker) -> None:
    log = Log()
    agree(real_broker, config(), log)
    train_to(real_broker, 0)
    real_broker.redis.set(real_broker.key("payload:t1"), b"of the other reward")
    changed = config(data={"train": "others"}, episode={"reward": "math"}, learner={"lr": 0.5})
    agree(real_broker, changed, log)
    kept = {key.decode() for key in real_broker.redis.scan_iter(real_broker.key("*"))}
    assert kept - {real_broker.key("reconfigured")} == {real_broker.key("config"), real_broker.key("release")}
    agree(real_broker, changed)
    ((line, values),) = log.lines
    assert "from the beginning" in line
    assert "learner.lr: 1e-06 -> 0.5" in values["changes"]


def test_a_run_whose_checkpoints_redis_has_lost_does_not_begin_again(real_broker: Broker, tmp_path: Path) -> None:
    folder = {"output_dir": str(tmp_path), "experiment": "lost"}
    agree(real_broker, config(run=folder))
    metadata = checkpoint(tmp_path / "lost", 7) / METADATA
    metadata.parent.mkdir(parents=True)
    metadata.touch()
    with pytest.raises(UserError, match="data.train .* cannot change after step 7"):
        agree(real_broker, config(run=folder, data={"train": "others"}))


def test_other_runs_on_the_server_are_left_alone(real_broker: Broker) -> None:
    neighbour = Broker(real_broker.redis, real_broker.run + "-2")
    agree(neighbour, config())
    agree(real_broker, config())
    agree(real_broker, config(data={"train": "others"}))
    agree(neighbour, config())


def test_after_the_first_step_some_keys_may_change(real_broker: Broker) -> None:
    agree(real_broker, config())
    train_to(real_broker, 4)
    agree(real_broker, config(learner={"lr": 0.5}, eval={"every": 3}), Log())
    assert [(change["step"], change["key"], change["from"], change["to"]) for change in changes_of(real_broker)] == [
        (4, "learner.lr", 1e-6, 0.5),
        (4, "eval.every", 10, 3),
    ]
    with pytest.raises(UserError, match=r"sampler.batch_size \(here 64, in the run 128\), which cannot change after"):
        agree(real_broker, config(sampler={"batch_size": 64}, learner={"lr": 0.5}, eval={"every": 3}))
    with pytest.raises(UserError, match="spo fork RUN NEW -o sampler.batch_size=..."):
        compare(real_broker, config(sampler={"batch_size": 64}))


def test_a_finished_run_goes_on_where_it_gets_more_steps(real_broker: Broker) -> None:
    agree(real_broker, config())
    train_to(real_broker, 10)
    real_broker.finish()
    agree(real_broker, config(eval={"every": 3}))
    assert real_broker.finished()
    agree(real_broker, config(eval={"every": 3}, run={"steps": 12}))
    assert not real_broker.finished()
    with pytest.raises(UserError, match="at step 10 already: run.steps = 9 is too low"):
        agree(real_broker, config(eval={"every": 3}, run={"steps": 9}))


def test_nothing_changes_under_a_process_that_lives(real_broker: Broker) -> None:
    agree(real_broker, config())
    with (
        Presence(real_broker, "generator-7", "generator", interval=0.05),
        pytest.raises(UserError, match=r"stop all of the run's processes first \(generator-7\)"),
    ):
        agree(real_broker, config(eval={"every": 3}))
    agree(real_broker, config(eval={"every": 3}))


def test_processes_that_were_killed_are_waited_for(real_broker: Broker) -> None:
    real_broker.dead_after = 0.5
    agree(real_broker, config())
    Presence(real_broker, "generator-7", "generator").beat()  # its last one
    agree(real_broker, config(eval={"every": 3}))
    assert real_broker.processes() == {}


def test_of_two_that_come_with_different_changes_one_is_refused(real_broker: Broker) -> None:
    agree(real_broker, config())
    outcomes: list[str] = []

    def come(every: int) -> None:
        broker = Broker(real_broker.redis, real_broker.run)
        try:
            agree(broker, config(eval={"every": every}))
            with Presence(broker, f"learner-{every}", "learner", interval=0.05):
                both.wait()
            outcomes.append("agreed")
        except UserError as error:
            outcomes.append("refused" if f"learner-{5 - every}" in str(error) else str(error))
            both.wait()

    both = threading.Barrier(2)
    threads = [threading.Thread(target=come, args=[every]) for every in (2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["agreed", "refused"]


def test_who_only_joins_changes_nothing(real_broker: Broker) -> None:
    agree(real_broker, config())
    with pytest.raises(UserError, match="use that, or choose another run.name"):
        agree(real_broker, config(eval={"every": 3}), may_differ=False)


def test_every_name_of_the_list_is_a_key() -> None:
    def keys(values: dict[str, Any], prefix: str = "") -> set[str]:
        return {
            name
            for key, value in values.items()
            for name in (keys(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}"})
        }

    all_keys = keys(config().model_dump(by_alias=True))
    assert [pattern for pattern in CHANGEABLE if pattern.removesuffix(".*") not in all_keys | {"eval"}] == []
    assert not may_change("sampler.batch_size")
