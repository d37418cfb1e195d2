"""Failing machinery in a run: the others go on, its own tasks are tried again, then set aside with what was said."""

from __future__ import annotations

import asyncio
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from common.messages import SampleHeader
from common.streams import dead
from common.streams.broker import Broker
from common.streams.tasks import TaskInbox
from generator.engine.engine import EngineFailed
from launcher.episodes import episode_lines
from launcher.folder.episodes import record_of
from sampler.episode_files import Rollouts
from sampler.records import DispatchedTask
from tests.support.episode import call, completion
from tests.support.generator import (
    TOKENIZER,
    Rig,
    failing,
    one,
    results,
    saying,
    story,
    until,
)
from tests.support.http_double import raw, serve
from tests.support.tool_examples import Blocked, Hanging

TOOLS = "tests.support.tool_examples"
SUM = call("calculator", '{"expression": "12*7"}') + "<|im_end|>"
OK = {("ok", 1.0)}


HANG = '<tool_call>{"name": "hang", "arguments": {"text": ""}}</tool_call>[END]'
CODE = "<code>print(7)</code>"


def prompted(prompt_ids: Any) -> Any:
    """The turn that a task's prompt asks for first, then the answer."""
    prompt = TOKENIZER.decode(prompt_ids)
    first = prompt.split("user\n")[1].split("<|im_end|>")[0]
    text = first if "<" in first and "<interpreter>" not in prompt else "7[END]"
    return completion(TOKENIZER.encode(text.replace("[END]", "<|im_end|>"), add_special_tokens=False))


def faulty(broker: Broker, tool: str = "Hanging", tool_timeout: float = 600.0, **sections: Any) -> Rig:
    episode = {"tools": [f"{TOOLS}:{tool}"], "max_assistant_turns": 2, "tool_timeout": tool_timeout}
    data, sampler = {"train": "t", "max_prompt_tokens": 200}, {"drift": {"mode": "ledger"}}
    rig = Rig(broker, **({"episode": episode, "data": data, "sampler": sampler} | sections))
    rig.engine.turn = prompted
    return rig


async def quick(rig: Rig, n: int) -> list[Any]:
    """Results of tasks that need no tool."""
    for i in range(n):
        rig.dispatch(1, prompt="2+5", task_id=f"quick {i}", answer="7")
    return await rig.headers(n)


def test_while_tools_hang_the_other_episodes_go_on(fake_broker: Broker) -> None:
    rig = faulty(fake_broker)
    rig.dispatch(2, prompt=HANG)  # two of four slots

    async def scene(rig: Rig) -> list[Any]:
        await until(lambda: rig.engine.calls == 2)
        return await quick(rig, 20)

    before = Hanging.cut
    assert results(rig.play(scene)) == OK
    assert Hanging.cut == before + 2  # at the end only, when the generator stopped


def test_tools_that_fill_asyncios_threads_delay_nobody_else(fake_broker: Broker) -> None:
    hanging = 8  # twice as many as there are threads
    rig = faulty(fake_broker, "Blocked", generator={"max_concurrency": hanging + 1, "max_attempts": 2})
    rig.dispatch(hanging, prompt=HANG.replace("hang", "blocked"))

    async def scene(rig: Rig) -> list[Any]:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(4))
        await until(lambda: Blocked.threads == 4 and rig.generator.slots_taken == hanging)
        try:
            return await quick(rig, 20)
        finally:
            Blocked.go.set()  # else the event loop's end waits for its threads

    assert results(rig.play(scene)) == OK


def test_a_failed_task_rests_while_its_slot_is_free(fake_broker: Broker) -> None:
    rig = faulty(
        fake_broker, tool_timeout=0.01, generator={"max_concurrency": 1, "max_attempts": 3, "retry_pause": 600}
    )
    rig.dispatch(1, prompt=HANG)

    async def scene(rig: Rig) -> list[Any]:
        await until(lambda: rig.generator.leased and not rig.generator.slots_taken)
        return await quick(rig, 3)

    assert results(rig.play(scene)) == OK
    assert rig.engine.calls == 4
    (handed_back,) = TaskInbox(fake_broker, "g2").take(10, 0)
    assert (handed_back.task.task_id, handed_back.attempt) == ("t0", 2)


def test_a_hung_tools_task_is_tried_again_then_set_aside(fake_broker: Broker) -> None:
    rig = faulty(fake_broker, tool_timeout=0.01)
    rig.dispatch(3, prompt=HANG)
    headers = rig.play(lambda rig: rig.headers(3))
    reason = "ToolUnavailable: tool hang: no end within episode.tool_timeout = 0.01 s"
    assert [(header.status, header.reason) for header in headers] == [("set_aside", reason)] * 3
    assert rig.engine.calls == 6  # generator.max_attempts = 2
    assert len(dead.list_dead(fake_broker)) == 3


def test_a_sandbox_that_dies_costs_a_retry_and_no_reward(fake_broker: Broker) -> None:
    def runs(handler: Any, body: Any) -> None:
        result = {"status": "Finished", "stdout": "7\n", "stderr": "", "return_code": 0, "execution_time": 0.1}
        raw(handler, json.dumps({"status": "Success", "message": "", "run_result": result}).encode())

    def dies(handler: Any, body: Any) -> None:
        handler.close_connection = True
        handler.connection.shutdown(socket.SHUT_RDWR)

    with serve(runs) as server:
        episode = {"tools": ["code_interpreter"], "call_format": "code", "max_assistant_turns": 2}
        rig = faulty(fake_broker, episode=episode, sandbox={"url": server.url, "attempts": 1})
        rig.dispatch(4, prompt=CODE, answer="7")

        async def scene(rig: Rig) -> list[Any]:
            alive = await rig.headers(4)
            server.answers[:] = [dies]
            for i in range(4):
                rig.dispatch(1, prompt=CODE, task_id=f"code {i}", answer="7")
                rig.dispatch(1, prompt="2+5", task_id=f"quick {i}", answer="7")
            return [*alive, *await rig.headers(8)]

        headers = rig.play(scene)
    code = [header for header in headers if header.task_id.startswith("code")]
    assert results([header for header in headers if header not in code]) == OK
    assert {header.status for header in code} == {"set_aside"}
    assert all(header.reason.startswith("SandboxUnavailable: sandbox 127.0.0.1") for header in code)
    # Four that worked, and two attempts at each of the others.
    assert len(server.requests) == 4 + 2 * 4


# Of a task that is set aside people can read what was said until it failed, and why it did.


def set_aside(broker: Broker, *turns: str | Exception, task: Any = None, **episode: Any) -> SampleHeader:
    """The header of one task that fails in every attempt."""
    rules = {"tools": ["calculator"], "max_assistant_turns": 3} | episode
    rig = Rig(broker, episode=rules, data={"train": "t", "max_prompt_tokens": 200})
    rig.engine.turn = saying(*turns)
    header = one(rig, **({"prompt": "What is 12*7?", "answer": "84"} | (task or {})))
    assert (header.status, header.reward) == ("set_aside", 0.0)
    return header


def test_what_was_said_before_the_engine_failed_is_kept(fake_broker: Broker, tmp_path: Path) -> None:
    header = set_aside(fake_broker, SUM, EngineFailed("out of blocks"), task={"keep": True})
    assert header.reason == "EngineFailed: out of blocks"
    record = story(header)
    assert (record["input"], record["gts"]) == ("What is 12*7?", "84")
    assert [(message["role"], message["content"]) for message in record["messages"][1:]] == [("tool", "84")]
    assert "token_ids" not in record  # nothing of it is trained on
    assert (header.turns, header.tool_calls) == (1, 1)
    assert header.tokens > header.model_tokens > 0
    # And `spo episodes` shows it.
    rollouts, task = Rollouts(tmp_path / "rollouts", every=10), DispatchedTask("p", False, 3, 0.5)
    assert rollouts.wants(task, header)
    rollouts.add(task, header, {"input": "never used"})
    rollouts.write()
    (line,) = (line for path in tmp_path.glob("rollouts/*.jsonl") for line in path.read_bytes().splitlines())
    text = "\n".join(line.plain for line in episode_lines(record_of(line) or {}))
    parts = ("skipped: EngineFailed: out of blocks", "What is 12*7?", "tool  calculator", "1 turns, 1 tool calls")
    assert all(part in text for part in parts)


@pytest.mark.integration
def test_what_was_said_to_a_reward_that_failed_is_kept(fake_broker: Broker) -> None:
    header = set_aside(fake_broker, "84<|im_end|>", reward="tests.support.some_rewards:broken")
    assert "KeyError" in header.reason
    assert story(header)["messages"] == [{"role": "assistant", "content": "84"}]


def test_where_nothing_is_kept_nothing_is_sent(fake_broker: Broker) -> None:
    assert set_aside(fake_broker, SUM, EngineFailed("x"), rollouts_every=0).record is None
    evaluated = set_aside(fake_broker, SUM, EngineFailed("x"), rollouts_every=0, task={"kind": "eval", "task_id": "e"})
    assert story(evaluated)["messages"]


def test_a_record_that_cannot_be_made_loses_no_task(fake_broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("generator.task_runner.make_record", failing(ValueError("odd")))
    header = set_aside(fake_broker, SUM, EngineFailed("out of blocks"))
    assert (header.reason, header.record, header.turns) == ("EngineFailed: out of blocks", None, 1)
