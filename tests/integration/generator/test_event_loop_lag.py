"""The event loop goes on while the text of episodes is hostile: it is not held up for 250 ms of computing.

Of each stall, only the time counts in which this process was computing, on one core: a busy machine changes
nothing, and a thread that holds the interpreter's lock counts as much as the event loop itself. A stall of ours comes
back when the same is said again; one that the machine makes, where it has to find memory, does not. The process is
set up as the generator's is.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from common.messages import Task
from generator.concurrency import LONG_TOKENS, offload, tune_interpreter
from generator.engine.engine import Completion
from generator.episode import make_record
from tests.support.episode import TEMPLATE, TOKENIZER, runner

pytestmark = pytest.mark.slow

MEGABYTE = 1 << 20
EPISODES, ASSISTANT_TURNS = 110, 4
LONG_ONE_IN = 40  # turns
ROUNDS = 3
LIMIT = 0.25  # seconds; docs/benchmarks.md has what it is on a quiet machine
HERE = "tests.integration.generator.test_event_loop_lag"


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


class FloodingInterpreter(Flood):
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
# A megabyte each: what is said in front, over and over, and behind.
TURNS = [
    ("", "<tool_call>", ""),
    ("", '<tool_call>{"name": "', ""),
    ("<tool_call>[", "1,", "</tool_call>"),
    ("", "<code>", ""),
    ("", '{"a":', ""),
    ("", f"<tool_call>{NUMBERS}</tool_call>", ""),
    ("", '<tool_call>{"name": "flood", "arguments": {}}</tool_call>', ""),
    ("<code>", "x", "</code>"),
    ("<tool_call>", " ", "</tool_call>"),
    ("", "\x1b\0\u20ac\U0001f600<|im_start|>", "<tool_call>"),
]


@functools.cache
def long_turns() -> list[np.ndarray]:
    """The same ids again and again: reading them is measured, not finding them."""
    return [
        np.concatenate([ids(before), np.tile(ids(said), MEGABYTE // len(said)), ids(after), ids(TEMPLATE.end)])
        for before, said, after in TURNS
    ]


def ids(text: str) -> np.ndarray:
    return np.asarray(TOKENIZER.encode(text, add_special_tokens=False), np.int32)


@functools.cache
def short_turn() -> np.ndarray:
    return ids('<tool_call>{"name": "flood"}</tool_call><code>1</code><|im_end|>')


class HostileEngine:
    """No work of its own: long turns now and then, short ones that call the tool otherwise."""

    tokenizer = TOKENIZER

    def __init__(self) -> None:
        self.long, self.calls = long_turns(), 0

    async def generate(self, prompt_ids: Any, *, max_tokens: int, **limits: Any) -> Completion:
        self.calls += 1
        now = self.calls % LONG_ONE_IN == 0
        said = self.long[self.calls // LONG_ONE_IN % len(self.long)] if now else short_turn()
        await asyncio.sleep(0.001)
        return Completion(said, np.zeros(len(said), np.float32), [(0, 0, len(said))], "stop")


async def longest_stall(call_format: str, tool: str) -> float:
    """Seconds for which the event loop ran nothing else, at most, while all episodes are played at once."""
    engine = HostileEngine()
    rules = runner(
        engine,
        max_model_len=1 << 24,
        max_assistant_turns=ASSISTANT_TURNS,
        max_response_tokens=1 << 23,
        max_tool_text=2000,
        call_format=call_format,
        tools=[f"{HERE}:{tool}"],
    )
    stalls: list[float] = []

    async def watch() -> None:
        while True:
            wall, computing = time.perf_counter(), time.process_time()
            await asyncio.sleep(0)
            stalls.append(min(time.perf_counter() - wall, time.process_time() - computing))

    async def play() -> str:
        episode = await rules.run(task)
        await offload(episode.length > LONG_TOKENS, make_record, task, episode, TEMPLATE)
        return episode.reason

    watching = asyncio.create_task(watch())
    task = Task(task_id="t", prompt_id="p", prompt="hi", keep=True)
    reasons = await asyncio.gather(*(play() for _ in range(EPISODES)))
    watching.cancel()
    assert set(reasons) <= {"stop", "max_assistant_turns"}
    # Each of the long turns was said.
    assert engine.calls >= LONG_ONE_IN * len(long_turns())
    return max(stalls)


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


@contextlib.contextmanager
def as_in_a_generator() -> Iterator[None]:
    """The process as the generator sets up its own; what other tests left behind is not collected here."""
    interval = sys.getswitchinterval()
    tune_interpreter()
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        gc.unfreeze()


def stall(call_format: str, tool: str) -> float:
    """The longest stall of the round in which it is shortest, of as many rounds as are needed."""
    longest = float("inf")
    with as_in_a_generator(), one_core():
        for _ in range(ROUNDS):
            longest = min(longest, asyncio.run(longest_stall(call_format, tool)))
            if longest < LIMIT:
                break
    return longest


@pytest.mark.parametrize(("call_format", "tool"), [("hermes", "Flood"), ("code", "FloodingInterpreter")])
def test_hostile_text_holds_nothing_up(call_format: str, tool: str) -> None:
    assert stall(call_format, tool) < LIMIT
