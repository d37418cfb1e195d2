"""The generator's loop with a pretend engine: it finishes, retries, skips or hands back each task it takes."""

from __future__ import annotations

import asyncio

import pytest
import structlog

from common.messages import Failure
from common.streams import dead
from common.streams.batches import BatchInbox
from common.streams.broker import Broker
from common.streams.presence import Presence
from common.streams.tasks import CONSUMER_GROUP, MAX_REASON, TaskInbox
from generator.engine.engine import EngineDied, EngineFailed
from sandbox_client import SandboxUnreachable
from tests.support.generator import DEADLINE, Rig, evaluate, failing, make_generator, one, over, playing, results, story
from tests.support.http_double import fails, serve
from tests.support.waiting import until

OK = {("ok", 1.0)}
USER = {"max_assistant_turns": 4, "user": "corrector"}


class Foreign(Exception):
    """An error of a library that has a `failure` of its own."""

    failure = "RewardFailed"


def test_every_task_becomes_a_header_and_a_payload(fake_broker: Broker) -> None:
    rig = Rig(fake_broker)
    rig.dispatch(10, answer="7")
    headers = rig.play(lambda rig: rig.headers(10))
    assert sorted(header.task_id for header in headers) == [f"t{i}" for i in range(10)]
    assert results(headers) == OK
    assert {header.record for header in headers} == {None}
    assert None not in BatchInbox(fake_broker).payloads([header.task_id for header in headers])
    assert fake_broker.redis.xinfo_consumers(fake_broker.key("tasks"), CONSUMER_GROUP) == []


@pytest.mark.parametrize(
    ("error", "failure", "reason"),
    [
        (asyncio.CancelledError(), Failure.CANCELLED, "it was cancelled from within"),
        (RuntimeError("half \ud800 " + "x" * 1_000_000), Failure.OTHER, "RuntimeError: half \\ud800 xxx"),
        (SystemExit(3), Failure.OTHER, "SystemExit: 3"),
        (Foreign("RewardFailed: it says"), Failure.OTHER, "Foreign: RewardFailed: it says"),
        (EngineFailed("it was cancelled"), Failure.ENGINE_FAILED, "EngineFailed: it was cancelled"),
        (SandboxUnreachable("away"), Failure.SANDBOX_UNAVAILABLE, "SandboxUnreachable: away"),
    ],
    ids=["cancels itself", "cannot be sent", "ends the process", "foreign", "own", "subclass"],
)
def test_a_failing_engine_is_tried_again_then_set_aside(fake_broker: Broker, error, failure, reason: str) -> None:
    rig = Rig(fake_broker)
    rig.engine.fail = failing(error)
    header = one(rig)
    assert (header.status, header.failure) == ("set_aside", failure)
    assert header.reason.startswith(reason)
    assert len(header.reason) <= MAX_REASON
    assert rig.engine.calls == 2  # generator.max_attempts
    assert len(dead.list_dead(fake_broker)) == 1


def test_a_task_that_is_kept_brings_every_token(fake_broker: Broker) -> None:
    header = one(Rig(fake_broker), keep=True, answer="7")
    (payload,) = BatchInbox(fake_broker).payloads([header.task_id])
    assert payload is not None
    said = {"input": "prompt 0", "output": "7<|im_end|>", "gts": "7"}
    said |= {"messages": [{"role": "assistant", "content": "7"}]}
    tokens = {"token_ids": payload.token_ids.tolist(), "model_spans": payload.model_spans.tolist()}
    assert story(header) == said | tokens | {"logprobs": [-0.5, -0.5], "version_spans": [[0, 0, 2]]}


def test_unfinished_tasks_are_handed_back_at_a_stop(fake_broker: Broker) -> None:
    rig = Rig(fake_broker)
    rig.dispatch(6)

    async def stop_in_the_middle(rig: Rig) -> None:
        rig.engine.hold.clear()
        await until(lambda: rig.engine.calls == 4)

    rig.play(stop_in_the_middle)
    assert rig.ledger.read(block_ms=0) == []
    deliveries = TaskInbox(fake_broker, "g2").take(10, 0)
    assert sorted((d.task.task_id, d.attempt) for d in deliveries) == [(f"t{i}", 1) for i in range(6)]


@playing()
async def test_a_task_waits_for_the_version_it_asks_for(rig: Rig) -> None:
    rig.dispatch(1, kind="eval", min_version=3)
    for version in (1, 2, 3):
        assert rig.engine.calls == 0
        rig.client.queue.put_nowait(version)
        await until(lambda version=version: rig.engine.version >= version)
    (header,) = await rig.headers(1)
    assert (header.kind, header.oldest_version) == ("eval", 3)
    assert story(header)["output"] == "7<|im_end|>"
    assert BatchInbox(rig.broker).payloads([header.task_id]) == [None]


def test_returns_of_turns_travel_where_turns_are_weighed(fake_broker: Broker) -> None:
    sections = {"algorithm": {"turn_advantage": "turn"}, "sampler": {"tracker": {"reward_range": (0.0, 2.0)}}}
    rig = Rig(fake_broker, episode=USER | {"user": "scripted"}, **sections)
    lines = [("a", "7", 0.25), ("b", "8", 0.5), ("c", "7", -0.125)]
    dialogue = [{"text": text, "check": check, "reward": reward} for text, check, reward in lines]
    header = one(rig, answer="7", row={"dialogue": dialogue})
    assert (header.reason, header.turns, header.turn_rewards) == ("user", 4, [0.0, 0.25, 0.0, -0.125])
    assert (header.reward, header.turn_returns) == (1.125, [1.125, 1.125, 0.875, 0.875])
    (payload,) = BatchInbox(fake_broker).payloads([header.task_id])
    assert header.turn_tokens == (payload.model_spans[:, 1] - payload.model_spans[:, 0]).tolist() == [2] * 4


@playing()
async def test_drift_is_measured_on_the_previous_response(rig: Rig) -> None:
    drifts = []
    for task_id in ("t0", "again"):
        rig.dispatch(1, task_id=task_id)
        drifts += [header.drift for header in await rig.headers(1)]
    assert drifts == [None, 0.25]
    rig.broker.finish()  # the end of the run ends the generator
    await asyncio.wait_for(rig.generator.stop.wait(), DEADLINE)


def test_each_task_is_scored_as_its_source_says(fake_broker: Broker) -> None:
    sources = [
        {"path": "exact.jsonl"},
        {"path": "tags.jsonl", "episode": {"reward": {"format": 0.25}, "reward_options": {"format": {"tags": ["7"]}}}},
        {"path": "brief.jsonl", "episode": {"max_response_tokens": 1}, "system_prompt": "a" * 10},
    ]
    rig = Rig(fake_broker, data={"train": sources, "max_prompt_tokens": 64})
    for task_id, source, answer in (("a", "exact", "7"), ("b", "tags", "8"), ("c", "brief", "7"), ("d", "gone", "")):
        rig.dispatch(1, task_id=task_id, source=source, answer=answer)
    rig.dispatch(1, task_id="long", source="exact", prompt="9" * 100)
    headers = {header.task_id: header for header in rig.play(lambda rig: rig.headers(5))}
    assert (headers["long"].failure, headers["long"].retire) == (Failure.PROMPT_TOO_LONG, True)
    assert rig.engine.calls == 3
    assert (headers["a"].reward, headers["b"].reward, headers["b"].reward_parts) == (1.0, 0.25, {"format": 1.0})
    assert headers["c"].tokens > headers["a"].tokens, "its system prompt is in front"
    assert headers["d"].status == "set_aside"
    assert "source 'gone'; data.train has exact, tags, brief" in headers["d"].reason


def test_without_a_learner_version_0_answers(fake_broker: Broker) -> None:
    rig = Rig(fake_broker, run={"steps": 0})
    rig.generator = make_generator(rig.config, fake_broker, rig.inbox, rig.engine, None, structlog.get_logger())
    rig.dispatch(5, kind="values", answer="7")
    headers = rig.play(lambda rig: rig.headers(5))
    assert {(header.kind, header.reward, header.newest_version) for header in headers} == {("values", 1.0, 0)}
    assert {story(header)["output"] for header in headers} == {"7<|im_end|>"}
    assert fake_broker.redis.keys(fake_broker.key("payload:") + "*") == []
    assert fake_broker.redis.keys(fake_broker.key("previous:") + "*") == []


@playing(run={"deterministic": True}, generator={"max_attempts": 2, "retry_pause": 0})
async def test_weights_wait_for_the_end_of_a_deterministic_episode(rig: Rig) -> None:
    rig.engine.hold.clear()
    rig.client.queue.put_nowait(3)
    rig.dispatch(1, min_version=3, seed=11)
    rig.dispatch(1, min_version=3, task_id="t1")
    await until(lambda: rig.engine.calls == 1)
    rig.client.queue.put_nowait(1)
    await until(rig.client.queue.empty)
    for _ in range(100):
        await asyncio.sleep(0)
    assert rig.engine.version == 3
    rig.engine.hold.set()
    headers = await rig.headers(1)
    await until(lambda: rig.engine.version == 1)
    rig.client.queue.put_nowait(3)
    headers += await rig.headers(1)
    assert [(header.oldest_version, header.newest_version) for header in headers] == [(3, 3), (3, 3)]
    assert [sampling["seed"] for sampling in rig.engine.sampling] == [11, None]


@playing()
async def test_newer_weights_wait_until_the_evaluation_is_over(rig: Rig) -> None:
    rig.engine.hold.clear()
    evaluate(rig, "e0", 6)
    await until(lambda: rig.engine.calls == 4)  # all slots
    rig.client.queue.put_nowait(1)
    rig.client.queue.put_nowait(2)
    rig.engine.hold.set()
    headers = await rig.headers(6)
    rig.dispatch(1)
    headers += await rig.headers(1)
    assert {(header.oldest_version, header.newest_version) for header in headers} == {(0, 0)}
    over(rig, "e0")
    await until(lambda: rig.engine.version == 2)


@playing(generator={"max_concurrency": 1, "max_attempts": 2, "retry_pause": 0})
async def test_tasks_that_await_weights_do_not_hold_up_an_evaluation(rig: Rig) -> None:
    rig.dispatch(9, min_version=1)
    await until(lambda: rig.generator.slots_taken == 1)
    evaluate(rig, "e0", 6)
    assert {header.kind for header in await rig.headers(6)} == {"eval"}
    rig.client.queue.put_nowait(1)
    over(rig, "e0")
    assert {header.kind for header in await rig.headers(9)} == {"train"}


def test_a_users_rewards_travel_with_the_sample(fake_broker: Broker) -> None:
    rig = Rig(fake_broker, episode=USER | {"user_options": {"turns": 2, "discount": 0.5}})
    rig.dispatch(1, keep=True, answer="8", task_id="wrong")
    rig.dispatch(1, keep=True, answer="7", task_id="right")
    headers = {header.task_id: header for header in rig.play(lambda rig: rig.headers(2))}
    right, wrong = headers["right"], headers["wrong"]
    assert (right.reason, right.reward, right.turn_rewards, right.turns) == ("user", 1.0, [0.0], 1)
    assert right.turn_returns == right.turn_tokens == [], "the episode is what is weighed"
    assert (wrong.reason, wrong.reward, wrong.turn_rewards, wrong.turns) == ("user", 0.0, [0.0] * 3, 3)
    again = ("user", "That is not right. Please try again.")
    messages = [(message["role"], message["content"]) for message in story(wrong)["messages"]]
    assert messages == [("assistant", "7"), again, ("assistant", "7"), again, ("assistant", "7"), ("user", "")]


def test_a_user_whose_endpoint_fails_is_no_reward(fake_broker: Broker) -> None:
    with serve(fails(503, "asleep")) as double:
        options = {"base_url": double.url, "model": "m", "attempts": 1}
        rig = Rig(fake_broker, episode=USER | {"user": "llm", "user_options": options})
        header = one(rig, row={"goal": "to sleep"}, keep=True)
    assert header.failure == Failure.CHAT_UNAVAILABLE
    assert header.reason.startswith("ChatUnavailable: ")
    assert header.reason.endswith("HTTP 503: asleep")
    assert len(double.requests) == 2  # generator.max_attempts


def test_an_idle_generator_says_that_the_learner_is_gone(fake_broker: Broker) -> None:
    rig = Rig(fake_broker)
    Presence(fake_broker, "learner", "learner").beat()
    fake_broker.redis.zincrby(fake_broker.key("alive"), -920_000, "learner")

    async def warned(rig: Rig) -> None:
        await until(lambda: any("the learner has been gone for 9" in line["event"] for line in logs))

    with structlog.testing.capture_logs() as logs:
        rig.play(warned)


def test_an_evaluation_is_left_to_those_that_can_answer_it(fake_broker: Broker) -> None:
    rig, older = Rig(fake_broker), TaskInbox(fake_broker, "older")

    async def scene(rig: Rig) -> list[str]:
        rig.client.queue.put_nowait(5)
        await until(lambda: rig.engine.version == 5)
        evaluate(rig, "e4", 3, version=4)
        return [header.kind for header in await rig.headers(3)]

    evaluate(rig, "e0", 2)
    assert older.lease(0, 1, 0).evaluation == "e0", "the first that is new enough decides"
    assert TaskInbox(fake_broker, "newer").lease(1, 5, 0) == ("", [])
    assert older.lease(0, 5, 0).evaluation == "e0"
    over(rig, "e0")
    assert older.lease(0, 5, 0) == older.lease(3, 5, 0) == ("", [])
    assert rig.play(scene) == ["eval"] * 3


def test_a_dead_engine_ends_the_process_and_hands_back(fake_broker: Broker) -> None:
    rig = Rig(fake_broker)
    rig.dispatch(3)

    async def die(rig: Rig) -> None:
        rig.engine.hold.clear()
        await until(lambda: rig.engine.calls == 3)
        rig.engine.died = True
        await until(lambda: not rig.generator.leased)

    with pytest.raises(EngineDied):
        rig.play(die)
    assert len(TaskInbox(fake_broker, "g2").take(10, 0)) == 3
