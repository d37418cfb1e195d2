"""Tools: what the model is told, what is retried, and that everything opened is closed."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from common.config import EpisodeConfig
from common.errors import UserError
from common.messages import Task
from generator.formats import MAX_CALLS, ToolCall
from generator.tools import Toolbox, ToolError, ToolUnavailable
from generator.tools.calculator import calculate
from generator.tools.toolbox import truncated
from sandbox_client import SandboxUnavailable
from tests.support import tool_examples
from tests.support.episode import ScriptedEngine, call, play, runner
from tests.support.golden import GOLDEN
from tests.support.tool_examples import Counter, Hanging

HERE = "tests.support.tool_examples"
TASK = Task(task_id="t", prompt_id="p", prompt="hi")


def toolbox(*names: str, **changes: Any) -> Toolbox:
    names = tuple(name if name in ("calculator", "code_interpreter") else f"{HERE}:{name}" for name in names)
    return Toolbox(EpisodeConfig(tools=list(names), **changes))


def results(box: Toolbox, *calls: ToolCall) -> list[str]:
    async def run() -> list[str]:
        return [result.text for result in await box.session(TASK).run(box.checked(list(calls)))]

    return asyncio.run(run())


@pytest.mark.parametrize("keep", ["left", "middle", "right"])
def test_golden_m04_long_text_is_cut(keep: Any) -> None:
    case = GOLDEN["M04"]
    assert truncated(case["inputs"]["text"], case["inputs"]["limit"], keep) == case["expected"][keep]
    assert truncated("x" * 10, 10, keep) == "x" * 10


@pytest.mark.parametrize("keep", ["left", "middle", "right"])
@pytest.mark.parametrize("limit", [1, 2, 7])
def test_exactly_as_many_characters_are_kept_as_allowed(keep: Any, limit: int) -> None:
    assert len(truncated("x" * 1000, limit, keep).replace("...", "").replace("(truncated)", "")) == limit


def test_the_model_is_told_what_is_wrong_with_a_call() -> None:
    texts = results(
        toolbox("calculator", "Echo"),
        ToolCall("shell"),
        ToolCall("shell" * 1000),
        ToolCall("calculator", {"number": 1}),
        ToolCall("calculator", {"expression": 5}),
        ToolCall("echo", {"text": ["a"] * 10_000}),
        ToolCall("", error="error: of the format"),
        ToolCall("calculator", {"expression": "1+1"}),
    )
    assert texts[0] == "error: no tool named 'shell'; there is calculator, echo"
    assert texts[2].startswith("error: wrong arguments: ")
    assert "expression: 5 is not of type 'string'" in texts[3]
    assert texts[4].startswith("error: wrong arguments: text: ")
    assert texts[5:] == ["error: of the format", "2"]
    assert max(map(len, texts)) < 300


def test_without_tools_there_is_none() -> None:
    assert results(toolbox(), ToolCall("x")) == ["error: no tool named 'x'; there is none"]


def test_of_too_many_calls_the_first_are_run() -> None:
    texts = results(toolbox("Echo"), *[ToolCall("echo", {"text": "x"})] * (MAX_CALLS + 50))
    assert texts == ["x"] * MAX_CALLS + [f"error: a turn may have {MAX_CALLS} calls; the others were not run"]


def test_calls_of_one_turn_run_at_the_same_time_and_are_answered_in_their_order() -> None:
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
        calls = [ToolCall("echo", {"text": text}) for text in ("first", "second", "last")]
        return [result.text for result in await box.session(TASK).run(calls)]

    assert asyncio.run(asyncio.wait_for(story(), 20)) == ["first", "second", "last"]


def test_an_exception_in_a_tool_is_told_the_model_in_one_short_line() -> None:
    advice, raised, timed_out = results(
        toolbox("Breaking"), *[ToolCall("break", {"text": text}) for text in ("tool", "any", "time")]
    )
    assert advice == "try again"
    assert raised.startswith("error: RuntimeError: bad luck xxx")
    assert len(raised) < 220
    assert timed_out == "error: TimeoutError: slow"


@pytest.mark.parametrize("how", ["cancelled", "exit"])
def test_a_tool_that_cancels_itself_or_wants_to_leave_has_raised(how: str) -> None:
    (text,) = results(toolbox("Breaking"), ToolCall("break", {"text": how}))
    assert text.startswith("error: RuntimeError: ")


def test_a_tool_that_is_unavailable_leaves_the_episode_and_cuts_the_other_calls() -> None:
    before = Hanging.cut
    with pytest.raises(ToolUnavailable, match="no server"):
        results(toolbox("Breaking", "Hanging"), ToolCall("hang", {"text": ""}), ToolCall("break", {"text": "gone"}))
    assert Hanging.cut == before + 1


def test_a_call_that_never_ends_is_failed_machinery() -> None:
    with pytest.raises(ToolUnavailable, match="tool hang: no end within episode.tool_timeout = 0.01 s"):
        results(toolbox("Hanging", tool_timeout=0.01), ToolCall("hang", {"text": ""}))


def test_what_a_hung_tool_waits_for_is_part_of_the_reason() -> None:
    box = toolbox("Hanging", tool_timeout=0.01)
    box.tools["hang"].waits_for = "a bus"
    with pytest.raises(ToolUnavailable, match="tool_timeout = 0.01 s, waiting for a bus$"):
        results(box, ToolCall("hang", {"text": ""}))


def test_a_call_that_takes_longer_than_its_tool_allows_is_told_the_model() -> None:
    texts = results(toolbox("Patient"), ToolCall("patient", {"text": ""}))
    assert texts == ["error: no result within 0.01 s"]


def test_results_that_nothing_can_encode_are_repaired() -> None:
    assert results(toolbox("Echo"), ToolCall("echo", {"text": "a\ud800b\0"})) == ["a?b\0"]


def test_arguments_of_a_tool_come_from_the_configuration() -> None:
    name = f"{HERE}:Echo"
    box = Toolbox(EpisodeConfig(tools=[name], tool_options={name: {"before": "> "}}))
    assert results(box, ToolCall("echo", {"text": "hi"})) == ["> hi"]


def test_a_tool_gets_what_its_constructor_asks_for() -> None:
    made = []

    def sandbox() -> str:
        made.append(1)
        return "box"

    name = f"{__name__}:Asking"
    box = Toolbox(EpisodeConfig(tools=[name]), {"sandbox": sandbox, "memory_mb": lambda: 3})
    assert box.tools["asking"].sandbox == "box"
    assert made == [1]


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


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("abacus", "episode.tools = 'abacus' is unknown; allowed: calculator, code_interpreter"),
        (f"{__name__}:HERE", "is not a class"),
        (f"{__name__}:Nameless", "`name` must be.*got 'no name'"),
        (f"{__name__}:NoSchema", "its schema is not a JSON schema"),
        (f"{__name__}:Synchronous", "needs `async def call"),
        (f"{__name__}:Slow", "limit of 30 s is never reached within episode.tool_timeout = 30 s"),
        (f"{__name__}:Asking", "tool_options of .*sandbox"),
    ],
)
def test_what_is_no_tool_is_a_user_error(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Toolbox(EpisodeConfig(tools=[name]))


def test_options_that_do_not_fit_are_a_user_error() -> None:
    name = f"{HERE}:Echo"
    with pytest.raises(UserError, match=r"tool_options of .*Echo': .*after.*; allowed: before"):
        Toolbox(EpisodeConfig(tools=[name], tool_options={name: {"after": "x"}}))


def test_two_tools_of_one_name_are_a_user_error() -> None:
    with pytest.raises(UserError, match="two tools named 'echo'"):
        toolbox("Echo", "Echo")


# Tools with state: opened when an episode first calls them, closed with it.


def counting_rules(*turns: str) -> tuple[Any, Counter]:
    box = toolbox("Counter")
    counter: Counter = box.tools["count"]
    return runner(ScriptedEngine(*turns), toolbox=box), counter


COUNT = call("count", "{}")


def test_state_lasts_for_an_episode_and_no_longer() -> None:
    rules, counter = counting_rules(
        f"{COUNT}{COUNT}<|im_end|>", f"{COUNT}<|im_end|>", "3<|im_end|>", COUNT, "1<|im_end|>"
    )

    async def story() -> list[list[str]]:
        tool_texts = []
        for _ in range(2):
            episode = await rules.run(TASK)
            tool_texts.append([entry.text for entry in episode.transcript.entries if entry.role == "tool"])
        return tool_texts

    assert asyncio.run(story()) == [["1", "2", "3"], ["1"]]
    assert counter.closed == [3, 1]


def test_an_episode_that_never_calls_a_tool_does_not_open_it() -> None:
    rules, counter = counting_rules("hi<|im_end|>")
    asyncio.run(rules.run(TASK))
    assert (counter.opened, counter.closed) == (0, [])


def test_state_is_closed_when_the_engine_fails() -> None:
    rules, counter = counting_rules(f"{COUNT}<|im_end|>")
    with pytest.raises(IndexError):  # nothing left to say
        asyncio.run(rules.run(TASK))
    assert counter.closed == [1]


def test_state_is_closed_to_the_end_when_the_episode_is_cancelled_twice() -> None:
    rules, counter = counting_rules(f"{COUNT}<|im_end|>")

    async def story() -> None:
        waiting, closing, go_on = asyncio.Event(), asyncio.Event(), asyncio.Event()
        first = rules.engine.generate

        async def generate(*arguments: Any, **limits: Any) -> Any:
            if not rules.engine.turns:
                waiting.set()
                await asyncio.Event().wait()
            return await first(*arguments, **limits)

        async def close(self: Any) -> None:
            closing.set()
            await go_on.wait()
            self.counter.closed.append(self.calls)

        rules.engine.generate = generate
        before, tool_examples.Counting.close = tool_examples.Counting.close, close  # type: ignore[method-assign]
        try:
            playing = asyncio.create_task(rules.run(TASK))
            await waiting.wait()
            playing.cancel()
            await closing.wait()
            playing.cancel()
            await asyncio.sleep(0)
            assert not playing.done()
            go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await playing
        finally:
            tool_examples.Counting.close = before  # type: ignore[method-assign]

    asyncio.run(asyncio.wait_for(story(), 20))
    assert counter.closed == [1]


def test_what_goes_wrong_while_closing_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def close(self: Any) -> None:
        raise RuntimeError("cannot close")

    monkeypatch.setattr(tool_examples.Counting, "close", close)
    rules, _ = counting_rules(f"{COUNT}<|im_end|>", "1<|im_end|>")
    assert asyncio.run(rules.run(TASK)).answer == "1"


def test_a_session_that_cannot_be_opened_leaves_the_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    async def open_(self: Any, task: Task) -> Any:
        raise ValueError("no room")

    monkeypatch.setattr(Counter, "open", open_)
    rules, _ = counting_rules(f"{COUNT}<|im_end|>")
    with pytest.raises(ValueError, match="no room"):
        asyncio.run(rules.run(TASK))


def test_the_sandbox_s_failure_leaves_the_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    async def call_(self: Any, text: str) -> str:
        raise SandboxUnavailable("gone")

    monkeypatch.setattr(tool_examples.Echo, "call", call_)
    with pytest.raises(SandboxUnavailable):
        play(ScriptedEngine(call("echo", json.dumps({"text": "x"})) + "<|im_end|>"), tools=[f"{HERE}:Echo"])


@pytest.mark.parametrize(
    ("expression", "value"), [("1+2*3", 7), ("-(4-6)*2", 4), ("7//2", 3), ("7%4", 3), ("1/4", 0.25), ("2.5*2", 5)]
)
def test_the_calculator_calculates(expression: str, value: float) -> None:
    assert calculate(expression) == value


WRONG = ["", "x", "__import__('os')", "(1).real", "9**9**9", "1/0", "1e999*1e999", "1e999*0", "[1]", "True+1", "1j"]
HUGE = ["1" * 201, "(" * 40, "(" * 200, "-" * 199 + "1x", "\0", "9" * 190 + "*1.0e300"]


@pytest.mark.parametrize("expression", [*WRONG, *HUGE])
def test_the_calculator_refuses_everything_else(expression: str) -> None:
    with pytest.raises(ToolError, match="error"):
        calculate(expression)
