"""Tasks that the sampler waits for and that exist nowhere in Redis any more are sent again."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.messages import Failure, Task
from common.streams import dead
from common.streams.broker import Broker
from common.streams.tasks import Finished, TaskInbox
from sampler import lost_tasks
from tests.support.sampler import NoopGenerator, NoopLearner, make_config
from tests.support.sampler_driving import audited, drive, start, started
from tests.support.streams import payload


@pytest.fixture(autouse=True)
def _check_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_tasks, "EVERY", 0.0)
    monkeypatch.setattr(lost_tasks, "SLICE", 3)


def test_a_run_ends_although_tasks_vanish_from_redis(broker: Broker, tmp_path: Path) -> None:
    sampler, generator, learner = started(broker, tmp_path, heldout=6)
    sampler.round()
    streams = (broker.key("tasks"), broker.key("tasks:e0"))
    vanished = 0
    for stream in streams:
        for entry_id, _ in broker.redis.xrange(stream)[1:4]:
            vanished += broker.redis.xdel(stream, entry_id)
    assert vanished == 6
    drive(sampler, generator, learner)
    assert audited(broker, sampler.config)["sent_again"] == 6


def test_a_lost_task_whose_prompt_has_left_the_data_ends_once(broker: Broker, tmp_path: Path) -> None:
    sampler, generator, learner = started(broker, tmp_path)
    sampler.round()
    ((entry_id, fields),) = broker.redis.xrange(broker.key("tasks"), count=1)
    broker.redis.xdel(broker.key("tasks"), entry_id)
    gone, data = Task.unpack(fields[b"task"]), tmp_path / "train.jsonl"
    rows = data.read_text().splitlines(keepends=True)
    data.write_text("".join(row for row in rows if json.loads(row)["prompt"] != gone.prompt))
    drive(start(sampler.config, broker, sampler.ledger), generator, learner)
    assert audited(broker, sampler.config)["set_aside"] == 1


def test_a_lost_task_is_not_brought_back_by_its_generator(broker: Broker, tmp_path: Path) -> None:
    sampler, generator, learner = started(broker, tmp_path)
    sampler.round()
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
    sampler.round()
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
    sampler.round()
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
