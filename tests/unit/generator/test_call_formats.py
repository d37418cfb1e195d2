"""Finding calls in any text at all, in time that grows with its length and no faster."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from generator.formats import MAX_CALL, MAX_CALLS, CodeBlocks, Hermes, ToolCall
from tests.support.episode import call
from tests.support.golden import GOLDEN

FORMATS = [Hermes(), CodeBlocks()]
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
        (
            call("say", json.dumps({"text": f"<tool_call>{ADD}</tool_call>"})),
            [ToolCall("say", {"text": f"<tool_call>{ADD}</tool_call>"})],
        ),
    ],
)
def test_json_calls_are_found(text: str, calls: list[ToolCall]) -> None:
    assert Hermes().find(text) == calls


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
HOSTILE = [
    "<tool_call>",
    "<tool_call></tool_call>",
    '<tool_call>{"a": "',
    "[",
    '{"a":',
    " ",
    "<code>",
    "</code>",
    "```",
]


@contextmanager
def steps_below(limit: int) -> Iterator[None]:
    """Counts the lines of Python that run: work that does not depend on how busy the machine is."""
    steps, before = itertools.count(), sys.gettrace()

    def trace(frame: Any, event: str, argument: Any) -> Any:
        assert next(steps) < limit
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("call_format", FORMATS, ids=["hermes", "code"])
@pytest.mark.parametrize("piece", HOSTILE)
@pytest.mark.parametrize("front", ["<tool_call>", "<code>"])
def test_a_megabyte_of_anything_takes_bounded_steps(call_format: Any, piece: str, front: str) -> None:
    text = front + piece * (MEGABYTE // len(piece))
    with steps_below(20_000):
        calls = call_format.find(text)
    assert len(calls) <= MAX_CALLS + 1
    assert sum(len(str(tool_call.arguments)) for tool_call in calls) < 8 * MEGABYTE
