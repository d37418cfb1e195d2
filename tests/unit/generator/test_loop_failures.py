"""Failing machinery in the middle of a run: the others go on, its own tasks are tried again, then set aside."""

from __future__ import annotations

import asyncio
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from common.streams import dead
from common.streams.broker import Broker
from common.streams.tasks import TaskInbox
from generator.engine.engine import Completion
from tests.support.generator import TOKENIZER, PretendEngine, Rig
from tests.support.http_double import raw, serve
from tests.support.tool_examples import Blocked, Hanging

TOOLS = "tests.support.tool_examples"
TOOL = f"{TOOLS}:Hanging"
ANSWER = "7<|im_end|>"


class Prompted(PretendEngine):
    """Says what the task's prompt asks for first, and then the answer."""

    def __init__(self) -> None:
        super().__init__()
        self.prompts: list[str] = []

    async def generate(self, prompt_ids: Any, *, max_tokens: int, **limits: Any) -> Completion:
        prompt = TOKENIZER.decode(prompt_ids)
        self.prompts.append(prompt)
        first = prompt.split("user\n")[1].split("<|im_end|>")[0]
        text = first if "<" in first and "<interpreter>" not in prompt else ANSWER
        ids = np.asarray(TOKENIZER.encode(text.replace("[END]", "<|im_end|>"), add_special_tokens=False), np.int32)
        return Completion(ids, np.full(len(ids), -0.5, np.float32), [(0, 0, len(ids))], "stop")


def rig(broker: Broker, **sections: Any) -> Rig:
    sections |= {"data": {"train": "t", "max_prompt_tokens": 200}, "sampler": {"drift": {"mode": "ledger"}}}
    return Rig(broker, Prompted(), **sections)


HANG = '<tool_call>{"name": "hang", "arguments": {"text": ""}}</tool_call>[END]'
CODE = "<code>print(7)</code>"


def test_while_tools_hang_the_other_episodes_go_on(fake_broker: Broker) -> None:
    # Two of four places hang for good, as far as this test is concerned.
    made = rig(fake_broker, episode={"tools": [TOOL], "max_assistant_turns": 2, "tool_timeout": 600})
    made.dispatch(2, prompt=HANG)

    async def story(made: Rig) -> list[Any]:
        async with asyncio.timeout(120):
            while sum("hang" in prompt for prompt in engine.prompts) < 2:
                await asyncio.sleep(0)
        for i in range(20):
            made.dispatch(1, prompt="2+5", task_id=f"quick {i}", answer="7")
        return await made.headers(20)

    engine: Any = made.generator.engine
    before = Hanging.cut
    headers = made.play(story)
    assert {(header.status, header.reward) for header in headers} == {("ok", 1.0)}
    assert Hanging.cut == before + 2  # at the end only, when the generator stopped


def test_tools_that_occupy_all_of_asyncio_s_threads_delay_no_other_episode(fake_broker: Broker) -> None:
    hanging = 8  # twice as many as there are threads
    made = rig(
        fake_broker,
        episode={"tools": [f"{TOOLS}:Blocked"], "max_assistant_turns": 2, "tool_timeout": 600},
        generator={"max_concurrency": hanging + 1, "max_attempts": 2},
    )
    made.dispatch(hanging, prompt=HANG.replace("hang", "blocked"))

    async def story(made: Rig) -> list[Any]:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(4))
        async with asyncio.timeout(120):
            while Blocked.threads < 4 or made.generator.slots_taken < hanging:
                await asyncio.sleep(0.001)
        for i in range(20):
            made.dispatch(1, prompt="2+5", task_id=f"quick {i}", answer="7")
        try:
            return await made.headers(20)
        finally:
            Blocked.go.set()  # else the event loop's end waits for its threads

    headers = made.play(story)
    assert {(header.status, header.reward) for header in headers} == {("ok", 1.0)}


def test_a_failed_task_rests_while_its_place_is_free_for_others(fake_broker: Broker) -> None:
    made = rig(
        fake_broker,
        episode={"tools": [TOOL], "max_assistant_turns": 2, "tool_timeout": 0.01},
        generator={"max_concurrency": 1, "max_attempts": 3, "retry_pause": 600},
    )
    made.dispatch(1, prompt=HANG)

    async def story(made: Rig) -> list[Any]:
        async with asyncio.timeout(120):
            while all(lease.takes_slot for lease in made.generator.leased):
                await asyncio.sleep(0.001)
        for i in range(3):
            made.dispatch(1, prompt="2+5", task_id=f"quick {i}", answer="7")
        return await made.headers(3)

    headers = made.play(story)
    assert {(header.status, header.reward) for header in headers} == {("ok", 1.0)}
    assert len(made.generator.engine.prompts) == 4  # type: ignore[attr-defined]
    (handed_back,) = TaskInbox(fake_broker, "g2").take(10, 0)
    assert (handed_back.task.task_id, handed_back.attempt) == ("t0", 2)


def test_what_cancels_itself_has_failed(fake_broker: Broker) -> None:
    made = Rig(fake_broker)

    def fail(call: int) -> None:
        raise asyncio.CancelledError

    made.engine.fail = fail
    made.dispatch(1)
    (header,) = made.play(lambda made: made.headers(1))
    assert (header.status, header.reason, made.engine.calls) == ("set_aside", "it was cancelled from within", 2)


def test_a_hung_tool_s_task_is_tried_again_and_then_set_aside(fake_broker: Broker) -> None:
    made = rig(fake_broker, episode={"tools": [TOOL], "max_assistant_turns": 2, "tool_timeout": 0.01})
    made.dispatch(3, prompt=HANG)
    engine: Any = made.generator.engine
    headers = made.play(lambda made: made.headers(3))
    reason = "ToolUnavailable: tool hang: no end within episode.tool_timeout = 0.01 s"
    assert [(header.status, header.reason) for header in headers] == [("set_aside", reason)] * 3
    assert len(engine.prompts) == 6  # generator.max_attempts = 2
    assert len(dead.list_dead(fake_broker)) == 3


def test_a_sandbox_that_dies_in_the_middle_costs_its_tasks_a_retry_and_no_reward(fake_broker: Broker) -> None:
    def runs(handler: Any, body: Any) -> None:
        result = {"status": "Finished", "stdout": "7\n", "stderr": "", "return_code": 0, "execution_time": 0.1}
        raw(handler, json.dumps({"status": "Success", "message": "", "run_result": result}).encode())

    def dies(handler: Any, body: Any) -> None:
        handler.close_connection = True
        handler.connection.shutdown(socket.SHUT_RDWR)

    with serve(runs) as server:
        made = rig(
            fake_broker,
            episode={"tools": ["code_interpreter"], "call_format": "code", "max_assistant_turns": 2},
            sandbox={"url": server.url, "attempts": 1},
        )
        made.dispatch(4, prompt=CODE, answer="7")
        alive = made.headers

        async def story(made: Rig) -> list[Any]:
            first = await alive(4)
            server.answers[:] = [dies]
            for i in range(4):
                made.dispatch(1, prompt=CODE, task_id=f"code {i}", answer="7")
                made.dispatch(1, prompt="2+5", task_id=f"quick {i}", answer="7")
            return [*first, *await alive(8)]

        headers = made.play(story)
    assert {(header.status, header.reward) for header in headers[:4]} == {("ok", 1.0)}
    quick = [header for header in headers[4:] if header.task_id.startswith("quick")]
    assert {(header.status, header.reward) for header in quick} == {("ok", 1.0)}
    code = [header for header in headers[4:] if header.task_id.startswith("code")]
    assert {header.status for header in code} == {"set_aside"}
    assert all(header.reason.startswith("SandboxUnavailable: sandbox 127.0.0.1") for header in code)
    # Four that worked, and two attempts at each of the others.
    assert len(server.requests) == 4 + 2 * 4
