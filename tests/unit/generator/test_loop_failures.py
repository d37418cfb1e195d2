"""Failing machinery in a run: other tasks go on, and the conversation until then is kept for inspection."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from common.errors import UserError
from common.messages import Failure, SampleHeader
from common.streams.broker import Broker
from common.streams.tasks import TaskInbox
from generator.engine.counts import EngineCounts
from generator.engine.engine import Engine, EngineDied, EngineFailed
from tests.support.episode import TOKENIZER, call
from tests.support.generator import Rig, failing, one, results, saying, story, stuck
from tests.support.tool_examples import Blocked
from tests.support.waiting import until

OK = {("ok", 1.0)}
SUM = call("calculator", '{"expression": "12*7"}') + "<|im_end|>"


def test_a_job_that_ends_without_a_result_has_failed(fake_broker: Broker) -> None:
    rig = Rig(fake_broker)
    rig.engine.fail = lambda _: asyncio.current_task().cancel()
    header = one(rig)
    assert (header.failure, header.reason) == (Failure.CANCELLED, "its job ended without a result: CancelledError()")
    assert rig.engine.calls == 2  # generator.max_attempts


def test_a_step_that_no_limit_ends_has_failed(fake_broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("generator.loop.STALL_SECONDS", 0.0)
    rig = Rig(fake_broker, episode={"max_seconds": 0.01})  # which this engine does not heed

    async def hangs(rig: Rig) -> list[Any]:
        rig.engine.hold.clear()
        rig.dispatch(1)
        lost = await rig.headers(1)
        monkeypatch.setattr("generator.loop.STALL_SECONDS", 60.0)  # the others may be slow on a busy machine
        rig.engine.hold.set()
        rig.dispatch(1, task_id="t1", answer="7")
        return lost + await rig.headers(1)

    with structlog.testing.capture_logs() as lines:
        lost, *others = rig.play(hangs)
    assert lost.failure == Failure.TIMED_OUT
    assert lost.reason.startswith("its step `generating` has not ended 0 s after its time limit")
    assert [line["task"] for line in lines if line["event"] == "episode failed"] == ["t0", "t0"]
    assert results(others) == OK


def test_a_failed_task_rests_while_its_slot_is_free(fake_broker: Broker) -> None:
    rig = Rig(fake_broker, generator={"max_concurrency": 1, "max_attempts": 3, "retry_pause": 600})
    rig.engine.fail = failing(EngineFailed("out of blocks"), {1})
    rig.dispatch(4, answer="7")
    assert results(rig.play(lambda rig: rig.headers(3))) == OK
    assert rig.engine.calls == 4
    (handed_back,) = TaskInbox(fake_broker, "g2").take(10, 0)
    assert handed_back.attempt == 2


def set_aside(broker: Broker, *turns: str | Exception, task: Any = None, **episode: Any) -> SampleHeader:
    rules = {"tools": ["calculator"], "max_assistant_turns": 3} | episode
    rig = Rig(broker, episode=rules, data={"train": "t", "max_prompt_tokens": 200})
    rig.engine.turn = saying(*turns)
    header = one(rig, **({"prompt": "What is 12*7?", "answer": "84"} | (task or {})))
    assert (header.status, header.reward) == ("set_aside", 0.0)
    return header


def test_what_was_said_before_the_engine_failed_is_kept(fake_broker: Broker) -> None:
    header = set_aside(fake_broker, SUM, EngineFailed("out of blocks"), task={"keep": True})
    assert header.reason == "EngineFailed: out of blocks"
    record = story(header)
    assert (record["input"], record["gts"]) == ("What is 12*7?", "84")
    assert [(message["role"], message["content"]) for message in record["messages"][1:]] == [("tool", "84")]
    assert "token_ids" not in record  # nothing of it is trained on
    assert (header.turns, header.tool_calls) == (1, 1)
    assert header.tokens > header.model_tokens > 0


def rewarded(broker: Broker, name: str, **generator: Any) -> Rig:
    episode = {"reward": f"tests.support.some_rewards:{name}", "reward_workers": 1}
    return Rig(broker, episode=episode, generator={"max_concurrency": 1, "retry_pause": 0.0} | generator)


def test_vllm_that_hangs_ends_the_process_and_hands_back(fake_broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(fake_broker)

    def is_sleeping() -> asyncio.Future[bool]:
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        if not rig.engine.calls:
            answer.set_result(False)
        return answer

    monkeypatch.setenv("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "0")
    rig.dispatch(3)
    llm = {"get_tokenizer": lambda: TOKENIZER, "model_config": SimpleNamespace(max_model_len=512), "errored": False}
    rig.engine.watch = Engine(SimpleNamespace(**llm, is_sleeping=is_sleeping), EngineCounts()).watch  # type: ignore[method-assign]
    with pytest.raises(EngineDied, match="vLLM hangs: it has given no answer for 0 s"):
        rig.play(stuck)
    assert len(TaskInbox(fake_broker, "g2").take(3, 0)) == 3


def test_a_run_folder_that_is_deleted_ends_the_process_and_hands_back(fake_broker: Broker, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    rig = Rig(fake_broker, run={"output_dir": str(tmp_path), "experiment": "mine"})
    rig.dispatch(3)
    folder.rmdir()
    with pytest.raises(UserError, match=f"^run folder {folder} was moved away or deleted"):
        rig.play(stuck)
    assert len(TaskInbox(fake_broker, "g2").take(3, 0)) == 3


@pytest.mark.integration
@pytest.mark.parametrize(
    ("reward", "words"),
    [
        ("broken", r"KeyError: 'no such column' \(\S+some_rewards.py:\d+\); the"),
        ("three", r"3\) is outside sampler.tracker.reward_range"),
    ],
)
def test_a_reward_that_fails_ten_times_in_a_row_ends_the_process(fake_broker: Broker, reward: str, words: str) -> None:
    rig = rewarded(fake_broker, reward, retry_pause=600.0)
    rig.dispatch(30)
    with structlog.testing.capture_logs() as lines, pytest.raises(UserError, match=words) as ended:
        rig.play(lambda rig: asyncio.Event().wait())
    assert "for 10 tasks in a row, and none was scored between them" in str(ended.value)
    assert rig.engine.calls < 15
    failures = [line["log_level"] for line in lines if line["event"] == "episode failed"]
    assert failures.count("warning") == (1 if reward == "broken" else len(failures))
    assert len(TaskInbox(fake_broker, "g2").take(30, 0)) == 30, "all tasks are handed back"


@pytest.mark.integration
def test_a_reward_that_fails_now_and_then_does_not(fake_broker: Broker) -> None:
    rig = rewarded(fake_broker, "odd_rows_fail", max_attempts=3, max_concurrency=4)
    rows = [{"n": n} for n in (1, 0) * 11]
    for i, row in enumerate(rows):
        rig.dispatch(1, task_id=f"t{i}", row=row)
    assert [header.status for header in rig.play(lambda rig: rig.headers(len(rows)))].count("set_aside") == 11


def test_where_nothing_is_kept_nothing_is_sent(fake_broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set_aside(fake_broker, SUM, EngineFailed("x"), rollouts_every=0).record is None
    evaluated = set_aside(fake_broker, SUM, EngineFailed("x"), rollouts_every=0, task={"kind": "eval", "task_id": "e"})
    assert story(evaluated)["messages"]
    # A record that cannot be made loses no task.
    monkeypatch.setattr("generator.task_runner.make_record", failing(ValueError("odd")))
    header = set_aside(fake_broker, SUM, EngineFailed("x"), task={"task_id": "t2"})
    assert (header.reason, header.record, header.turns) == ("EngineFailed: x", None, 1)


def with_tool(broker: Broker, tool: str, **generator: Any) -> Rig:
    """A generator whose tasks call this tool where their prompt does, and answer 7 otherwise."""
    episode = {"tools": [f"tests.support.tool_examples:{tool}"], "max_assistant_turns": 2, "tool_timeout": 600.0}
    rig = Rig(broker, episode=episode, data={"train": "t", "max_prompt_tokens": 200}, generator=generator)

    def turn(prompt_ids: Any) -> Any:
        asked = TOKENIZER.decode(prompt_ids).split("user\n")[1].split("<|im_end|>")[0]
        return saying((asked if asked.startswith("<tool_call>") else "7") + "<|im_end|>")(prompt_ids)

    rig.engine.turn = turn
    return rig


async def quick(rig: Rig, n: int) -> list[Any]:
    for i in range(n):
        rig.dispatch(1, prompt="2+5", task_id=f"quick {i}", answer="7")
    return await rig.headers(n)


def test_tools_that_fill_asyncios_threads_delay_no_others(fake_broker: Broker) -> None:
    hanging = 8  # twice as many as there are threads
    rig = with_tool(fake_broker, "Blocked", max_concurrency=hanging + 1)
    rig.dispatch(hanging, prompt=call("blocked", '{"text": ""}'))

    async def scene(rig: Rig) -> list[Any]:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(4))
        await until(lambda: Blocked.threads == 4 and rig.generator.slots_taken == hanging)
        try:
            return await quick(rig, 20)
        finally:
            Blocked.go.set()  # else the event loop's end waits for its threads

    assert results(rig.play(scene)) == OK
