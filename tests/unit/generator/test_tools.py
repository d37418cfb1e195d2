"""Tools: which calls are found in a turn, what the model is told, and that everything opened is closed."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for

from common.config import EpisodeConfig
from common.messages import Task
from generator.formats import MAX_CALL, MAX_CALLS, CodeBlocks, Hermes, ToolCall
from generator.tools import EpisodeTools, Toolbox, ToolError, ToolUnavailable
from generator.tools.calculator import calculate
from generator.tools.toolbox import make_validator, truncated
from sandbox_client import SandboxUnavailable
from tests.support import tool_examples
from tests.support.episode import END, Blocking, ScriptedEngine, call, runner, tool_texts
from tests.support.event_loop import in_event_loop
from tests.support.golden import GOLDEN
from tests.support.tool_examples import CountingSession, CountingTool, Hanging

HERE = "tests.support.tool_examples"
TASK = Task(task_id="t", prompt_id="p", prompt="hi")


def toolbox(*names: str, **changes: Any) -> Toolbox:
    names = tuple(name if name in ("calculator", "code_interpreter") else f"{HERE}:{name}" for name in names)
    return Toolbox(EpisodeConfig(tools=list(names), **changes))


def results(box: Toolbox, *calls: ToolCall) -> list[str]:
    async def run() -> list[str]:
        return [result.text for result in await EpisodeTools(box, TASK).run(box.checked(list(calls)))]

    return asyncio.run(asyncio.wait_for(run(), 60))


def said(name: str, text: Any) -> ToolCall:
    return ToolCall(name, {"text": text})


@pytest.mark.parametrize("keep", ["left", "middle", "right"])
def test_golden_m04_long_text_is_cut(keep: Any) -> None:
    case = GOLDEN["M04"]
    assert truncated(case["inputs"]["text"], case["inputs"]["limit"], keep) == case["expected"][keep]
    for limit, kept in ((7, 7), (10, 10), (11, 10)):
        assert len(truncated("x" * 10, limit, keep).replace("...", "").replace("(truncated)", "")) == kept


MANY = [said("echo", "x")] * (MAX_CALLS + 50)
LARGE = (10**400, float("inf"))  # as a model may write them in JSON
ENDS = ("asyncio.CancelledError", "SystemExit", "GeneratorExit")
FIRST = ["x"] * MAX_CALLS + [f"error: a turn may have {MAX_CALLS} calls; the others were not run"]


@pytest.mark.parametrize(
    ("tools", "calls", "texts"),
    [
        (["calculator", "Echo"], [ToolCall("shell")], ["error: no tool named 'shell'; there is calculator, echo"]),
        ([], [ToolCall("x" * 1000)], ["error: no tool named 'xxxxxxxx"]),
        (["calculator"], [ToolCall("calculator", {"expression": 5})], ["error: wrong arguments: expression: 5 is not"]),
        (["Echo"], [said("echo", ["a"] * 10_000)], ["error: wrong arguments: text: "]),
        (["Stepping"], [ToolCall("step", {"by": by}) for by in LARGE], ["error: wrong arguments: a number is too"] * 2),
        (["Echo"], [ToolCall("", error="error: of the format")], ["error: of the format"]),
        (["Echo"], [said("echo", "a\ud800b\0")], ["a?b\0"]),
        (["Echo"], MANY, FIRST),
        (["Breaking"], [said("break", "ToolError('try again')")], ["try again"]),
        (["Breaking"], [said("break", "RuntimeError('bad\\nluck' + 'x' * 1000)")], ["error: RuntimeError: bad luckx"]),
        # What a tool does to end the process or its task is an exception like any other.
        (["Breaking"], [said("break", f"{error}()") for error in ENDS], ["error: RuntimeError: "] * 3),
        (["Patient"], [said("patient", "")], ["error: no result within 0.01 s"]),
    ],
)
def test_the_model_is_told_what_a_call_gives(tools: list[str], calls: list[ToolCall], texts: list[str]) -> None:
    answers = results(toolbox(*tools), *calls)
    assert [text[: len(start)] for text, start in zip(answers, texts, strict=True)] == texts
    assert max(map(len, answers)) < 300


@pytest.mark.parametrize("text", ["ToolUnavailable('no server')", "SandboxUnavailable('no server')"])
def test_machinery_that_fails_leaves_the_episode_and_cuts_the_other_calls(text: str) -> None:
    before = Hanging.cut
    with pytest.raises((ToolUnavailable, SandboxUnavailable), match="no server"):
        results(toolbox("Hanging", "Breaking"), said("hang", ""), said("break", text))
    assert Hanging.cut == before + 1
    box = toolbox("Hanging", tool_timeout=0.01)
    box.tools["hang"].waits_for = "a bus"
    with pytest.raises(ToolUnavailable, match="tool hang: no end within .* = 0.01 s, waiting for a bus$"):
        results(box, said("hang", ""))


def test_calls_of_a_turn_run_together_and_are_answered_in_order() -> None:
    last_came = asyncio.Event()

    class Waiting(tool_examples.Echo):
        async def call(self, text: str) -> str:
            if text == "last":
                last_came.set()
            await last_came.wait()
            return text

    box = toolbox("Echo")
    box.tools["echo"] = Waiting()
    assert results(box, *(said("echo", text) for text in ("first", "last"))) == ["first", "last"]


class Asking(tool_examples.Echo):
    name = "asking"

    def __init__(self, sandbox: str) -> None:
        self.sandbox = sandbox


def test_arguments_of_a_tool_come_from_the_configuration() -> None:
    name = f"{HERE}:Echo"
    box = Toolbox(EpisodeConfig(tools=[name], tool_options={name: {"before": "> "}}))
    assert results(box, said("echo", "hi")) == ["> hi"]
    provided = {"sandbox": lambda: "box", "memory_mb": lambda: 3}
    assert Toolbox(EpisodeConfig(tools=[f"{__name__}:Asking"]), provided).tools["asking"].sandbox == "box"


COUNT = call("count", "{}")


def counting(*turns: str) -> tuple[Any, CountingTool]:
    box = toolbox("CountingTool")
    counter: CountingTool = box.tools["count"]
    return runner(ScriptedEngine(*turns), toolbox=box), counter


def test_state_lasts_for_an_episode_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    rules, counter = counting(f"{COUNT}{COUNT}{END}", f"{COUNT}{END}", f"3{END}", COUNT, f"1{END}", f"hi{END}", COUNT)

    assert [tool_texts(asyncio.run(rules.run(TASK))) for _ in range(3)] == [["1", "2", "3"], ["1"], []]
    assert (counter.opened, counter.closed) == (2, [3, 1])  # not for an episode that never calls it
    with pytest.raises(IndexError):  # the engine fails: nothing is left to say
        asyncio.run(rules.run(TASK))
    assert counter.closed == [3, 1, 1]

    fails = mock.AsyncMock(side_effect=ValueError("no room"))
    monkeypatch.setattr(CountingSession, "close", fails)  # which changes nothing
    rules, _ = counting(f"{COUNT}{END}", f"1{END}", f"{COUNT}{END}")
    assert asyncio.run(rules.run(TASK)).answer == "1"
    before = TASK.model_copy(deep=True)
    monkeypatch.setattr(CountingTool, "open", lambda _, task: (task.row.update(changed=True), fails())[1])
    with pytest.raises(ValueError, match="no room"):
        asyncio.run(rules.run(TASK))
    assert before == TASK, "a tool gets a copy"


VALUES = {"1+2*3": 7, "-(4-6)*2": 4, "7//2": 3, "7%4": 3, "1/4": 0.25}
WRONG = ["", "__import__('os')", "(1).real", "9**9**9", "1/0", "1e999*0", "True+1"]
HUGE = ["1" * 201, "(" * 200, "9" * 190 + "*1.0e300"]


@pytest.mark.parametrize("expression", [*VALUES, *WRONG, *HUGE])
def test_the_calculator_does_arithmetic_and_nothing_else(expression: str) -> None:
    if expression in VALUES:
        assert calculate(expression) == VALUES[expression]
        return
    with pytest.raises(ToolError, match="error"):
        calculate(expression)


DRAFTS = [{}, {"$schema": "http://json-schema.org/draft-04/schema#"}]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(0, 2) | st.sampled_from([0.0, 1.0, 1.5, "", "1"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=6,
)


@settings(max_examples=25)
@given(st.lists(JSON, max_size=6) | JSON, st.booleans(), st.sampled_from(DRAFTS))
def test_equal_items_are_those_of_json_schema(items: Any, unique: bool, draft: dict[str, str]) -> None:
    schema = draft | {"properties": {"items": {"uniqueItems": unique}}}
    ours, theirs = make_validator(schema), validator_for(schema, default=Draft202012Validator)(schema)
    made, expected = ([error.message for error in one.iter_errors({"items": items})] for one in (ours, theirs))
    assert made == expected


@in_event_loop
async def test_state_is_closed_to_the_end_when_cancelled_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    closing, close, box = Blocking(), CountingSession.close, toolbox("CountingTool")

    async def slow_close(self: Any) -> None:
        await closing.wait()
        await close(self)

    monkeypatch.setattr(CountingSession, "close", slow_close)
    session = EpisodeTools(box, TASK)
    await session.run([ToolCall("count")])
    ending = asyncio.create_task(session.close())
    await closing.entered.wait()
    for _ in range(2):
        ending.cancel()
        await asyncio.sleep(0)
    assert not ending.done()
    closing.released.set()
    with pytest.raises(asyncio.CancelledError):
        await ending
    assert box.tools["count"].closed == [1]


M02 = GOLDEN["M02"]


def program(code: str) -> ToolCall:
    return ToolCall("code_interpreter", {"code": code})


def test_golden_m02_and_m03_programs_of_a_turn_as_they_are() -> None:
    for text, programs in zip(M02["inputs"]["texts"], M02["expected"]["code"], strict=True):
        assert CodeBlocks().find(text) == [program(code) for code in programs]
    for code in GOLDEN["M03"]["inputs"]["code"]:
        assert CodeBlocks().find(f"<code>\n{code}\n</code>") == [program(code)]
        assert CodeBlocks().find(f"<code>\n```python\n{code}\n```\n</code>") == [program(code)]
    assert "hi".join(CodeBlocks.wrap) == GOLDEN["M04"]["expected"]["wrapped_hi"]
    # A closing tag alone is half of a call.
    assert CodeBlocks().find("x = 1</code>") == [ToolCall("", error="error: </code> without <code>")]
    assert CodeBlocks().find("a </code> in passing") == []


ADD = '{"name": "add", "arguments": {"a": 1}}'
ADDED = ToolCall("add", {"a": 1})
WITHIN = f"<tool_call>{ADD}</tool_call>"


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (f"so\n<tool_call>\n{ADD}\n</tool_call>\nand <tool_call> {ADD} </tool_call> bye", [ADDED, ADDED]),
        # Unterminated: a whole call counts, a part of one is no call.
        (f"<tool_call>{ADD}", [ADDED]),
        (f"<tool_call>{ADD}<tool_call>{ADD}</tool_call>", [ADDED, ADDED]),
        ('<tool_call>{"name": "add"', []),
        # Nested: the innermost; tags within strings are text.
        (f"<tool_call><tool_call>{ADD}</tool_call></tool_call>", [ADDED]),
        (f"I write <tool_call> tags: <tool_call>{ADD}</tool_call>", [ADDED]),
        (call("say", json.dumps({"text": WITHIN})), [ToolCall("say", {"text": WITHIN})]),
    ],
)
def test_json_calls_are_found(text: str, calls: list[ToolCall]) -> None:
    assert Hermes().find(text) == calls


@pytest.mark.parametrize(
    ("call_format", "call"), [(Hermes(), f"<tool_call>{ADD}</tool_call>"), (CodeBlocks(), "<code>1</code>")]
)
def test_one_call_more_than_are_run_is_read_so_that_the_model_is_told(call_format: Any, call: str) -> None:
    for written in (MAX_CALLS - 1, MAX_CALLS, MAX_CALLS + 1, MAX_CALLS + 5):
        assert len(call_format.find(call * written)) == min(written, MAX_CALLS + 1)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("nonsense", "not valid JSON"),
        ('{"name": "x"} and more', "not valid JSON"),
        ('{"name": "x", "arguments": {"a": NaN}}', "not valid JSON"),
        ('{"name": "x", "arguments": {"a": "\\ud800"}}', "not valid JSON"),
        ('{"a":' * 10_000, "not valid JSON"),
        ("[1]", '"name"'),
        ('{"name": "x", "arguments": 3}', "must be an object"),
        ('{"name": "x", "arguments": {"a": "' + "a" * MAX_CALL + '"}}', "longer than"),
    ],
)
def test_a_malformed_call_is_a_call_with_an_error(body: str, error: str) -> None:
    (tool_call,) = Hermes().find(f"<tool_call>{body}</tool_call>")
    assert error in tool_call.error


MEGABYTE = 1 << 20
HOSTILE = ["<tool_call>", "<tool_call></tool_call>", '<tool_call>{"a": "', "<code>", "</code>"]
HOSTILE += ["[", '{"a":', " ", "```"]


@contextmanager
def steps_below(limit: int) -> Iterator[None]:
    """Counts the lines of Python that run: work that does not depend on how busy the machine is."""
    steps, before = itertools.count(), sys.gettrace()

    def trace(*_: Any) -> Any:
        assert next(steps) < limit
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("call_format", [Hermes(), CodeBlocks()], ids=["hermes", "code"])
@pytest.mark.parametrize("piece", HOSTILE)
@pytest.mark.parametrize("front", ["<tool_call>", "<code>"])
def test_a_megabyte_of_anything_takes_bounded_steps(call_format: Any, piece: str, front: str) -> None:
    text = front + piece * (MEGABYTE // len(piece))
    with steps_below(20_000):
        calls = call_format.find(text)
    assert len(calls) <= MAX_CALLS + 1
    assert sum(len(str(tool_call.arguments)) for tool_call in calls) < 8 * MEGABYTE
