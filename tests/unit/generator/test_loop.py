"""The generator's loop with an engine that only pretends: what it takes it finishes, retries or hands back."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from structlog.testing import capture_logs

from common.messages import SampleHeader
from common.payload import open_record
from common.streams import dead
from common.streams.batches import BatchInbox
from common.streams.broker import Broker
from common.streams.presence import Presence
from common.streams.tasks import GROUP, MAX_REASON, TaskInbox
from generator.engine.engine import EngineDied
from generator.metrics import GeneratorMetrics
from tests.support.generator import DEADLINE, Rig
from tests.support.http_double import fails, serve


def opened(header: SampleHeader) -> dict[str, Any]:
    """The record that came with a header."""
    assert header.record is not None
    return json.loads(open_record(header.record))


def test_every_task_becomes_a_header_and_a_payload(fake_broker: Broker) -> None:
    rig = Rig(fake_broker)
    rig.dispatch(10, answer="7")
    headers = rig.play(lambda rig: rig.headers(10))
    assert sorted(header.task_id for header in headers) == [f"t{i}" for i in range(10)]
    assert {header.reward for header in headers} == {1.0}
    assert None not in BatchInbox(fake_broker).payloads([header.task_id for header in headers])
    assert fake_broker.redis.xinfo_consumers(fake_broker.key("tasks"), GROUP) == []


def test_a_failing_engine_is_tried_again_and_then_the_task_is_set_aside(fake_broker: Broker) -> None:
    rig = Rig(fake_broker)

    def fail(call: int) -> None:
        raise RuntimeError("out of memory")

    rig.engine.fail = fail
    rig.dispatch(1)
    (header,) = rig.play(lambda rig: rig.headers(1))
    assert (header.status, header.reason) == ("set_aside", "RuntimeError: out of memory")
    assert rig.engine.calls == 2  # generator.max_attempts
    assert len(dead.list_dead(fake_broker)) == 1


def test_a_failure_that_passes_leaves_no_trace_in_the_reward(fake_broker: Broker) -> None:
    rig = Rig(fake_broker)

    def fail(call: int) -> None:
        if call == 1:
            raise ConnectionError("sandbox went away")

    rig.engine.fail = fail
    rig.dispatch(1, answer="7")
    (header,) = rig.play(lambda rig: rig.headers(1))
    assert (header.status, header.reward) == ("ok", 1.0)


def test_a_prompt_that_is_too_long_is_retired(fake_broker: Broker) -> None:
    rig = Rig(fake_broker)
    rig.dispatch(1, prompt="9" * 100)
    (header,) = rig.play(lambda rig: rig.headers(1))
    assert header.status == "set_aside"
    assert header.retire
    assert "data.max_prompt_tokens" in header.reason
    assert rig.engine.calls == 0


def test_unfinished_tasks_are_handed_back_at_a_stop(fake_broker: Broker) -> None:
    rig = Rig(fake_broker)
    rig.dispatch(6)

    async def stop_in_the_middle(rig: Rig) -> None:
        rig.engine.hold.clear()
        async with asyncio.timeout(DEADLINE):
            while rig.engine.calls < 4:
                await asyncio.sleep(0)

    rig.play(stop_in_the_middle)
    assert rig.ledger.read(block_ms=0) == []
    other = TaskInbox(fake_broker, "g2")
    assert sorted((d.task.task_id, d.attempt) for d in other.take(10, 0)) == [(f"t{i}", 1) for i in range(6)]


def test_a_dead_engine_ends_the_process_and_hands_everything_back(fake_broker: Broker) -> None:
    rig = Rig(fake_broker)
    rig.dispatch(3)

    async def scene() -> None:
        rig.engine.hold = asyncio.Event()
        running = asyncio.create_task(rig.generator.run())
        async with asyncio.timeout(DEADLINE):
            while rig.engine.calls < 3:
                await asyncio.sleep(0)
        rig.engine.died = True
        await asyncio.wait_for(running, DEADLINE)

    with pytest.raises(EngineDied):
        asyncio.run(scene())
    assert len(TaskInbox(fake_broker, "g2").take(10, 0)) == 3


def test_a_task_waits_for_the_version_it_asks_for(fake_broker: Broker) -> None:
    rig = Rig(fake_broker)
    rig.dispatch(1, kind="eval", min_version=3)

    async def publish_later(rig: Rig) -> Any:
        for version in (1, 2, 3):
            assert rig.engine.calls == 0
            rig.client.queue.put_nowait(version)
            async with asyncio.timeout(DEADLINE):
                while rig.engine.version < version:
                    await asyncio.sleep(0)
        return await rig.headers(1)

    (header,) = rig.play(publish_later)
    assert (header.kind, header.oldest_version) == ("eval", 3)
    assert opened(header)["output"] == "7<|im_end|>"
    assert BatchInbox(fake_broker).payloads([header.task_id]) == [None]


def test_a_task_that_is_kept_brings_its_episode_with_every_token(fake_broker: Broker) -> None:
    rig = Rig(fake_broker)
    rig.dispatch(1, keep=True, answer="7")
    (header,) = rig.play(lambda rig: rig.headers(1))
    (payload,) = BatchInbox(fake_broker).payloads([header.task_id])
    assert payload is not None
    story = opened(header)
    assert (story["input"], story["output"], story["gts"]) == ("prompt 0", "7<|im_end|>", "7")
    assert story["messages"] == [{"role": "assistant", "content": "7"}]
    assert story["token_ids"] == payload.token_ids.tolist()
    assert story["model_spans"] == payload.model_spans.tolist()
    assert story["logprobs"] == payload.logprobs.tolist() == [-0.5, -0.5]
    assert story["version_spans"] == [[0, 0, 2]]


def test_a_task_that_is_not_kept_brings_no_episode(fake_broker: Broker) -> None:
    rig = Rig(fake_broker)
    rig.dispatch(1)
    (header,) = rig.play(lambda rig: rig.headers(1))
    assert header.record is None


USER = {"max_assistant_turns": 4, "user": "corrector"}


def test_a_user_is_heard_and_his_rewards_travel_with_the_sample(fake_broker: Broker) -> None:
    rig = Rig(fake_broker, episode=USER | {"user_options": {"turns": 2, "discount": 0.5}})
    rig.dispatch(2, keep=True, answer="8")
    rig.dispatch(1, keep=True, answer="7", task_id="right")
    headers = {header.task_id: header for header in rig.play(lambda rig: rig.headers(3))}
    right, wrong = headers["right"], headers["t1"]
    assert (right.reason, right.reward, right.turn_rewards, right.turns) == ("user", 1.0, [0.0], 1)
    assert right.turn_returns == right.turn_tokens == [], "the episode is what is weighed"
    assert (wrong.reason, wrong.reward, wrong.turn_rewards, wrong.turns) == ("user", 0.0, [0.0] * 3, 3)
    said = [(message["role"], message["content"]) for message in opened(wrong)["messages"]]
    again = ("user", "That is not right. Please try again.")
    assert said == [("assistant", "7"), again, ("assistant", "7"), again, ("assistant", "7"), ("user", "")]


def test_what_followed_each_turn_travels_with_the_sample_where_turns_have_their_own_advantages(
    fake_broker: Broker,
) -> None:
    rig = Rig(
        fake_broker,
        episode=USER | {"user": "scripted"},
        algorithm={"turn_advantage": "turn"},
        sampler={"tracker": {"reward_range": (0.0, 2.0)}},
    )
    dialogue = [
        {"text": "a", "check": "7", "reward": 0.25},
        {"text": "b", "check": "8", "reward": 0.5},
        {"text": "c", "check": "7", "reward": -0.125},
    ]
    rig.dispatch(1, answer="7", row={"dialogue": dialogue})
    (header,) = rig.play(lambda rig: rig.headers(1))
    assert header.turn_rewards == [0.0, 0.25, 0.0, -0.125]
    assert (header.reward, header.turn_returns) == (1.125, [1.125, 1.125, 0.875, 0.875])
    (payload,) = BatchInbox(fake_broker).payloads([header.task_id])
    assert header.turn_tokens == (payload.model_spans[:, 1] - payload.model_spans[:, 0]).tolist() == [2] * 4


def test_a_user_whose_endpoint_fails_is_no_reward(fake_broker: Broker) -> None:
    with serve(fails(503, "asleep")) as double:
        options = {"base_url": double.url, "model": "m", "attempts": 1}
        rig = Rig(fake_broker, episode=USER | {"user": "llm", "user_options": options})
        rig.dispatch(1, row={"goal": "to sleep"}, keep=True)
        (header,) = rig.play(lambda rig: rig.headers(1))
    assert header.status == "set_aside"
    assert header.reason.startswith("ChatUnavailable: ")
    assert header.reason.endswith("HTTP 503: asleep")
    assert len(double.requests) == 2  # generator.max_attempts


def test_a_reason_that_cannot_be_sent_as_it_is_is_sent_in_part(fake_broker: Broker) -> None:
    rig = Rig(fake_broker)

    def fail(call: int) -> None:
        raise RuntimeError("half a pair \ud800 " + "x" * 1_000_000)

    rig.engine.fail = fail
    rig.dispatch(1)
    (header,) = rig.play(lambda rig: rig.headers(1))
    assert header.reason.startswith("RuntimeError: half a pair \\ud800 xxx")
    assert len(header.reason) == MAX_REASON


def test_drift_is_measured_on_the_previous_response_of_the_same_prompt(fake_broker: Broker) -> None:
    rig = Rig(fake_broker)

    async def twice(rig: Rig) -> list[Any]:
        rig.dispatch(1)
        (first,) = await rig.headers(1)
        rig.dispatch(1, task_id="again")
        (second,) = await rig.headers(1)
        return [first.drift, second.drift]

    assert rig.play(twice) == [None, 0.25]


def test_the_end_of_the_run_ends_the_generator(fake_broker: Broker) -> None:
    rig = Rig(fake_broker)

    async def finish(rig: Rig) -> None:
        rig.broker.finish()
        await asyncio.wait_for(rig.generator.stop.wait(), DEADLINE)

    rig.play(finish)


def test_an_idle_generator_says_that_the_learner_is_gone(fake_broker: Broker) -> None:
    rig = Rig(fake_broker)
    Presence(fake_broker, "learner", "learner").beat()
    fake_broker.redis.zincrby(fake_broker.key("alive"), -920_000, "learner")

    async def warned(rig: Rig) -> None:
        async with asyncio.timeout(DEADLINE):
            while not any("the learner has been gone for 9" in line["event"] for line in logs):
                await asyncio.sleep(0.01)

    with capture_logs() as logs:
        rig.play(warned)


def test_a_generator_publishes_what_it_measures(fake_broker: Broker) -> None:
    meter = GeneratorMetrics()
    meter.finished(10, 20)
    meter.updated(pulled=0.1, pause=0.02)
    with meter.waiting_for_tasks(idle=True):
        waiting = meter.status(0, 0)["metrics"]["generator/waiting_for_tasks_seconds"]
    metrics = meter.status(slots=3, awaiting_weights=1)["metrics"]
    assert 0 < waiting <= metrics["generator/waiting_for_tasks_seconds"], "a wait that goes on counts too"
    assert (metrics["generator/slots"], metrics["generator/slots_awaiting_weights"]) == (3, 1)
    assert (metrics["generator/tokens"], metrics["generator/pause_ms_per_update"]) == (10, 20)
