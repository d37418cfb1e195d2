"""Tools: what the model is told, what is retried, and that everything opened is closed."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for

from common.config import EpisodeConfig
from common.errors import UserError
from common.messages import Task
from generator.formats import MAX_CALLS, ToolCall
from generator.tools import Toolbox, ToolError, ToolUnavailable
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
        return [result.text for result in await box.session(TASK).run(box.checked(list(calls)))]

    return asyncio.run(asyncio.wait_for(run(), 60))


def said(name: str, text: Any) -> ToolCall:
    return ToolCall(name, {"text": text})


@pytest.mark.parametrize("keep", ["left", "middle", "right"])
def test_golden_m04_long_text_is_cut(keep: Any) -> None:
    case = GOLDEN["M04"]
    assert truncated(case["inputs"]["text"], case["inputs"]["limit"], keep) == case["expected"][keep]
    assert truncated("x" * 10, 10, keep) == "x" * 10
    for limit in (1, 2, 7):
        assert len(truncated("x" * 1000, limit, keep).replace("...", "").replace("(truncated)", "")) == limit


MANY = [said("echo", "x")] * (MAX_CALLS + 50)
FIRST = ["x"] * MAX_CALLS + [f"error: a turn may have {MAX_CALLS} calls; the others were not run"]


@pytest.mark.parametrize(
    ("tools", "calls", "texts"),
    [
        (["calculator", "Echo"], [ToolCall("shell")], ["error: no tool named 'shell'; there is calculator, echo"]),
        (["calculator"], [ToolCall("shell" * 1000)], ["error: no tool named 'shellshell"]),
        ([], [ToolCall("x")], ["error: no tool named 'x'; there is none"]),
        (["calculator"], [ToolCall("calculator", {"number": 1})], ["error: wrong arguments: "]),
        (["calculator"], [ToolCall("calculator", {"expression": 5})], ["error: wrong arguments: expression: 5 is not"]),
        (["Echo"], [said("echo", ["a"] * 10_000)], ["error: wrong arguments: text: "]),
        (["Echo"], [ToolCall("", error="error: of the format")], ["error: of the format"]),
        (["calculator"], [ToolCall("calculator", {"expression": "1+1"})], ["2"]),
        (["Echo"], [said("echo", "a\ud800b\0")], ["a?b\0"]),
        (["Echo"], MANY, FIRST),
        (["Breaking"], [said("break", "tool"), said("break", "any")], ["try again", "error: RuntimeError: bad luck x"]),
        (["Breaking"], [said("break", "time")], ["error: TimeoutError: slow"]),
        # What a tool does to end the process or its task is an exception like any other.
        (["Breaking"], [said("break", how) for how in ("cancelled", "exit", "panic")], ["error: RuntimeError: "] * 3),
        (["Patient"], [said("patient", "")], ["error: no result within 0.01 s"]),
    ],
    ids=str,
)
def test_the_model_is_told_what_a_call_gives(tools: list[str], calls: list[ToolCall], texts: list[str]) -> None:
    answers = results(toolbox(*tools), *calls)
    assert [text[: len(start)] for text, start in zip(answers, texts, strict=True)] == texts
    assert max(map(len, answers)) < 300


@pytest.mark.parametrize(("most", "count", "run"), [(1, 3, 1), (2, 2, 2), (2, 5, 2)])
def test_calls_of_a_turn_are_bounded(most: int, count: int, run: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("generator.tools.toolbox.MAX_CALLS", most)
    calls = [said("echo", str(number)) for number in range(count)]
    told = [f"error: a turn may have {most} calls; the others were not run"] * (count > run)
    assert results(toolbox("Echo"), *calls) == [str(number) for number in range(run)] + told


@pytest.mark.parametrize(
    ("tool", "text", "changes", "reason"),
    [
        ("Breaking", "gone", {}, "no server"),
        ("Breaking", "sandbox", {}, "no sandbox"),
        ("Hanging", "", {}, "tool hang: no end within episode.tool_timeout = 0.01 s$"),
        ("Hanging", "", {"waits_for": "a bus"}, "tool_timeout = 0.01 s, waiting for a bus$"),
    ],
)
def test_machinery_that_fails_leaves_the_episode(tool: str, text: str, changes: dict[str, str], reason: str) -> None:
    box = toolbox(tool, tool_timeout=0.01 if tool == "Hanging" else 30)
    (name,) = box.tools
    vars(box.tools[name]).update(changes)
    with pytest.raises((ToolUnavailable, SandboxUnavailable), match=reason):
        results(box, said(name, text))


def test_a_failed_call_cuts_the_others_of_its_turn() -> None:
    before = Hanging.cut
    with pytest.raises(ToolUnavailable, match="no server"):
        results(toolbox("Breaking", "Hanging"), said("hang", ""), said("break", "gone"))
    assert Hanging.cut == before + 1


def test_calls_of_a_turn_run_together_and_are_answered_in_order() -> None:
    async def story() -> list[str]:
        last_came = asyncio.Event()

        class Waiting(tool_examples.Echo):
            async def call(self, text: str) -> str:
                if text == "last":
                    last_came.set()
                await last_came.wait()
                return text

        box = toolbox("Echo")
        box.tools["echo"] = Waiting()
        calls = [said("echo", text) for text in ("first", "second", "last")]
        return [result.text for result in await box.session(TASK).run(calls)]

    assert asyncio.run(asyncio.wait_for(story(), 20)) == ["first", "second", "last"]


class Asking(tool_examples.Echo):
    name = "asking"

    def __init__(self, sandbox: str) -> None:
        self.sandbox = sandbox


class Nameless(tool_examples.Echo):
    name = "no name"


class NoSchema(tool_examples.Echo):
    schema = {"type": "nothing"}  # noqa: RUF012


class Synchronous(tool_examples.Echo):
    def call(self, text: str) -> str:  # type: ignore[override]
        return text


class Slow(tool_examples.Echo):
    timeout = 30.0


def test_arguments_of_a_tool_come_from_the_configuration() -> None:
    name = f"{HERE}:Echo"
    box = Toolbox(EpisodeConfig(tools=[name], tool_options={name: {"before": "> "}}))
    assert results(box, said("echo", "hi")) == ["> hi"]
    made: list[str] = []

    def sandbox() -> str:
        made.append("box")
        return "box"

    box = Toolbox(EpisodeConfig(tools=[f"{__name__}:Asking"]), {"sandbox": sandbox, "memory_mb": lambda: 3})
    assert box.tools["asking"].sandbox == "box"
    assert made == ["box"]


@pytest.mark.parametrize(
    ("tools", "options", "message"),
    [
        (["abacus"], {}, "episode.tools = 'abacus' is unknown; allowed: calculator, code_interpreter"),
        ([f"{__name__}:HERE"], {}, "is not a class"),
        ([f"{__name__}:Nameless"], {}, "`name` must be.*got 'no name'"),
        ([f"{__name__}:NoSchema"], {}, "its schema is not a JSON schema"),
        ([f"{__name__}:Synchronous"], {}, "needs `async def call"),
        ([f"{__name__}:Slow"], {}, "limit of 30 s is never reached within episode.tool_timeout = 30 s"),
        ([f"{__name__}:Asking"], {}, "tool_options of .*sandbox"),
        ([f"{HERE}:Echo"], {f"{HERE}:Echo": {"after": "x"}}, "tool_options of .*Echo': .*after.*; allowed: before"),
        ([f"{HERE}:Echo"] * 2, {}, "two tools named 'echo'"),
    ],
)
def test_what_is_no_tool_is_a_user_error(tools: list[str], options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Toolbox(EpisodeConfig(tools=tools, tool_options=options))


# Tools with state: opened when an episode first calls them, closed with it.

COUNT = call("count", "{}")


def counting(*turns: str) -> tuple[Any, CountingTool]:
    box = toolbox("CountingTool")
    counter: CountingTool = box.tools["count"]
    return runner(ScriptedEngine(*turns), toolbox=box), counter


def test_state_lasts_for_an_episode_and_no_longer() -> None:
    rules, counter = counting(f"{COUNT}{COUNT}{END}", f"{COUNT}{END}", f"3{END}", COUNT, f"1{END}", f"hi{END}", COUNT)

    async def story() -> list[list[str]]:
        return [tool_texts(await rules.run(TASK)) for _ in range(3)]

    assert asyncio.run(story()) == [["1", "2", "3"], ["1"], []]
    assert (counter.opened, counter.closed) == (2, [3, 1])  # not for an episode that never calls it
    with pytest.raises(IndexError):  # the engine fails: nothing is left to say
        asyncio.run(rules.run(TASK))
    assert counter.closed == [3, 1, 1]


@in_event_loop
async def test_state_is_closed_to_the_end_when_cancelled_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    closing, close, box = Blocking(), CountingSession.close, toolbox("CountingTool")

    async def slow_close(self: Any) -> None:
        await closing.wait()
        await close(self)

    monkeypatch.setattr(CountingSession, "close", slow_close)
    session = box.session(TASK)
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


def raises(error: Exception) -> Any:
    async def method(self: Any, *_: Any, **named: Any) -> Any:
        raise error

    return method


def test_errors_of_opening_leave_and_of_closing_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CountingSession, "close", raises(RuntimeError("cannot close")))
    rules, _ = counting(f"{COUNT}{END}", f"1{END}", f"{COUNT}{END}")
    assert asyncio.run(rules.run(TASK)).answer == "1"
    monkeypatch.setattr(CountingTool, "open", raises(ValueError("no room")))
    with pytest.raises(ValueError, match="no room"):
        asyncio.run(rules.run(TASK))


VALUES = {"1+2*3": 7, "-(4-6)*2": 4, "7//2": 3, "7%4": 3, "1/4": 0.25, "2.5*2": 5}
WRONG = ["", "x", "__import__('os')", "(1).real", "9**9**9", "1/0", "1e999*1e999", "1e999*0", "[1]", "True+1", "1j"]
HUGE = ["1" * 201, "(" * 40, "(" * 200, "-" * 199 + "1x", "\0", "9" * 190 + "*1.0e300"]


@pytest.mark.parametrize("expression", [*VALUES, *WRONG, *HUGE])
def test_the_calculator_does_arithmetic_and_nothing_else(expression: str) -> None:
    if expression in VALUES:
        assert calculate(expression) == VALUES[expression]
        return
    with pytest.raises(ToolError, match="error"):
        calculate(expression)


# Arguments are checked as JSON schema says, however many there are.

DRAFTS = [{}, {"$schema": "http://json-schema.org/draft-04/schema#"}]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(0, 2) | st.sampled_from([0.0, 1.0, 1.5, "", "1"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=6,
)


@given(st.lists(JSON, max_size=6) | JSON, st.booleans(), st.sampled_from(DRAFTS))
def test_equal_items_are_those_of_json_schema(items: Any, unique: bool, draft: dict[str, str]) -> None:
    schema = draft | {"properties": {"items": {"uniqueItems": unique}}}
    ours, theirs = make_validator(schema), validator_for(schema, default=Draft202012Validator)(schema)
    made, expected = ([error.message for error in one.iter_errors({"items": items})] for one in (ours, theirs))
    assert made == expected


def test_many_objects_are_not_compared_with_one_another() -> None:
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    def steps(items: int) -> int:
        nonlocal calls
        calls = 0
        rows = [{"a": i} if i % 2 else [i] for i in range(items)]
        sys.setprofile(count)
        try:
            assert make_validator({"properties": {"items": {"uniqueItems": True}}}).is_valid({"items": rows})
        finally:
            sys.setprofile(None)
        return calls

    few, many, more = steps(0), steps(1000), steps(2000)
    assert more - few <= 2.1 * (many - few)
