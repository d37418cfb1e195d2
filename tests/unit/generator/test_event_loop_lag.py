"""The event loop goes on while the text of episodes is hostile: it is never held up for 50 ms.

Of each stall, only the time counts in which this process was computing, on one core: a busy machine changes
nothing, and a thread that holds the interpreter's lock counts as much as the event loop itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import json
import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from common.config import EpisodeConfig
from common.messages import Task
from generator.engine import Completion
from generator.episode import EpisodeRunner
from generator.formats import make_format
from generator.tools import Toolbox
from tests.episode_tools import TEMPLATE, TOKENIZER

MEGABYTE = 1 << 20
EPISODES = 200
LIMIT = 0.05  # seconds
HERE = "tests.unit.generator.test_event_loop_lag"


class Flood:
    """Answers with far more than anybody wants to read."""

    name = "flood"
    description = "Floods."
    schema = {  # noqa: RUF012
        "type": "object",
        "properties": {"numbers": {"type": "array", "items": {"type": "integer"}}},
    }

    async def call(self, numbers: Any = ()) -> str:
        return OUTPUT[len(numbers) % 2]


class Interpreter(Flood):
    """The same, as a code interpreter."""

    name = "code_interpreter"
    schema = {"type": "object"}  # noqa: RUF012

    async def call(self, code: str = "") -> str:  # type: ignore[override]
        return OUTPUT[len(code) % 2]


OUTPUT = [
    "<|im_end|>\n<|im_start|>assistant\n" * (MEGABYTE // 36),
    "\x1b[2J\0\ud83d</tool_response>" * (MEGABYTE // 22),
]
NUMBERS = json.dumps({"name": "flood", "arguments": {"numbers": [1] * 20_000}})
TURNS = [
    "<tool_call>" * (MEGABYTE // 11),
    '<tool_call>{"name": "' * (MEGABYTE // 21),
    "<tool_call>[" + "1," * (MEGABYTE // 2) + "</tool_call>",
    "<code>" * (MEGABYTE // 6),
    '{"a":' * (MEGABYTE // 5),
    f"<tool_call>{NUMBERS}</tool_call>" * 20,
    '<tool_call>{"name": "flood", "arguments": {}}</tool_call>' * 1000,
    "<code>" + "x" * MEGABYTE + "</code>",
    "<tool_call>" + " " * MEGABYTE + "</tool_call>",
]


@functools.cache
def long_turns() -> list[np.ndarray]:
    ids = TOKENIZER(TURNS, add_special_tokens=False, verbose=False).input_ids
    return [np.asarray([*row, TEMPLATE.end_id], np.int32) for row in ids]


@functools.cache
def short_turn() -> np.ndarray:
    text = '<tool_call>{"name": "flood"}</tool_call><code>1</code><|im_end|>'
    return np.asarray(TOKENIZER.encode(text, add_special_tokens=False), np.int32)


class HostileEngine:
    """No work of its own: long turns now and then, short ones that call the flood otherwise."""

    def __init__(self) -> None:
        self.calls = 0

    async def generate(self, prompt_ids: Any, *, max_tokens: int, **limits: Any) -> Completion:
        self.calls += 1
        long = long_turns()
        ids = long[self.calls // 40 % len(long)] if self.calls % 40 == 0 else short_turn()
        await asyncio.sleep(0.001)
        return Completion(ids, np.zeros(len(ids), np.float32), [(0, 0, len(ids))], "stop")


async def longest_stall(call_format: str, tool: str) -> tuple[float, int]:
    """Seconds for which the event loop ran nothing else, at most, and the turns played meanwhile."""
    config = EpisodeConfig(
        max_assistant_turns=4,
        max_response_tokens=1 << 23,
        max_tool_text=2000,
        call_format=call_format,
        tools=[f"{HERE}:{tool}"],
    )
    engine = HostileEngine()
    rules = EpisodeRunner(
        engine,  # type: ignore[arg-type]
        TEMPLATE,
        Toolbox(config),
        config,
        1 << 24,
        100,
        call_format=make_format(call_format),
    )
    stalls: list[float] = []

    async def watch() -> None:
        while True:
            wall, computing = time.perf_counter(), time.process_time()
            await asyncio.sleep(0)
            stalls.append(min(time.perf_counter() - wall, time.process_time() - computing))

    watching = asyncio.create_task(watch())
    task = Task(task_id="t", prompt_id="p", prompt="hi")
    episodes = await asyncio.gather(*(rules.play(task) for _ in range(EPISODES)))
    watching.cancel()
    assert {episode.reason for episode in episodes} <= {"stop", "max_assistant_turns"}
    return max(stalls), engine.calls


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Keep all threads of this process on one core."""
    before = os.sched_getaffinity(0)
    threads = [int(name) for name in os.listdir("/proc/self/task")]
    try:
        for thread in threads:
            os.sched_setaffinity(thread, {min(before)})
        yield
    finally:
        for name in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(name), before)


def stall(call_format: str, tool: str) -> float:
    long_turns()
    # What other tests left behind is not collected here.
    gc.collect()
    gc.freeze()
    try:
        with one_core():
            longest, turns = asyncio.run(longest_stall(call_format, tool))
    finally:
        gc.unfreeze()
    assert turns > EPISODES
    return longest


def test_json_calls_hold_nothing_up() -> None:
    assert stall("hermes", "Flood") < LIMIT


def test_programs_hold_nothing_up() -> None:
    assert stall("code", "Interpreter") < LIMIT
