"""Finding calls in any text at all, in time that grows with its length and no faster."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import UserError
from generator.formats import MAX_CALL, MAX_CALLS, CodeBlocks, Hermes, ToolCall, make_format
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
        (f"<tool_call>{ADD}</tool_call>", [ADDED]),
        (f"so\n<tool_call>\n{ADD}\n</tool_call>\nand <tool_call> {ADD} </tool_call> bye", [ADDED, ADDED]),
        ('<tool_call>{"name": "now"}</tool_call>', [ToolCall("now")]),
        # Unterminated: a whole call counts, a part of one is no call.
        (f"<tool_call>{ADD}", [ADDED]),
        (f"<tool_call>{ADD}<tool_call>{ADD}</tool_call>", [ADDED, ADDED]),
        ('<tool_call>{"name": "add"', []),
        ("<tool_call>", []),
        ("</tool_call>", []),
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
        ("{'name': 'x'}", "not valid JSON"),
        ('{"name": "x"} and more', "not valid JSON"),
        ('{"name": "x", "arguments": {"a": NaN}}', "not valid JSON"),
        ('{"name": "x", "arguments": {"a": "\\ud800"}}', "not valid JSON"),
        ('{"name": "x", "arguments": {"a": ' + "9" * 5000 + "}}", "not valid JSON"),
        ('{"a":' * 10_000, "not valid JSON"),
        ("[1]", '"name"'),
        ('{"name": 3}', '"name"'),
        ('{"name": "x", "arguments": 3}', "must be an object"),
        ('{"name": "x", "arguments": {"a": "' + "a" * MAX_CALL + '"}}', "longer than"),
    ],
)
def test_a_malformed_call_is_a_call_with_an_error(body: str, error: str) -> None:
    (tool_call,) = Hermes().find(f"<tool_call>{body}</tool_call>")
    assert error in tool_call.error


@pytest.mark.parametrize(("call_format", "text"), zip(FORMATS, [call("add", "{}"), "<code>x</code>"], strict=True))
def test_of_too_many_calls_one_too_many_is_found(call_format: Any, text: str) -> None:
    assert len(call_format.find(text * 1000)) == MAX_CALLS + 1


MEGABYTE = 1 << 20
HOSTILE = [
    *("<tool_call>", "<tool_call></tool_call>", "</tool_call>", "<tool_call>{", '<tool_call>{"a": "', "<tool_call"),
    *('<tool_call>{"a\\": "\\', "<tool_call>[1,", "1,", "[", '{"a":', " ", "\0", "\x1b[2J", "🙂\u202e"),
    *("<code>", "</code>", "```", "<code>```python\n```"),
]


class CountedLines:
    """Counts the lines of Python that run: work that does not depend on how busy the machine is."""

    def __init__(self, limit: int) -> None:
        self.count, self.limit = 0, limit

    def __enter__(self) -> None:
        self.before = sys.gettrace()
        sys.settrace(self.trace)

    def __exit__(self, *error: object) -> None:
        sys.settrace(self.before)

    def trace(self, frame: Any, event: str, argument: Any) -> Any:
        self.count += 1
        assert self.count < self.limit
        return self.trace


@pytest.mark.parametrize("call_format", FORMATS, ids=["hermes", "code"])
@pytest.mark.parametrize("piece", HOSTILE)
@pytest.mark.parametrize("front", ["", "<tool_call>", "<code>", call("add", "{}")])
def test_a_megabyte_of_anything_takes_bounded_steps(call_format: Any, piece: str, front: str) -> None:
    text = front + piece * (MEGABYTE // len(piece))
    with CountedLines(limit=20_000):
        calls = call_format.find(text)
    assert len(calls) <= MAX_CALLS + 1
    assert sum(len(str(tool_call.arguments)) for tool_call in calls) < 8 * MEGABYTE


@given(st.lists(st.sampled_from([*HOSTILE, ADD, "</tool_call>", "</code>", "x", "\n", '"']), max_size=30))
def test_any_mixture_of_tags_is_read(pieces: list[str]) -> None:
    for call_format in FORMATS:
        for tool_call in call_format.find("".join(pieces)):
            assert tool_call.error or tool_call.name
            json.dumps(tool_call.arguments, ensure_ascii=False).encode()


class Unfinished:
    stop = ()


class Demanding(Hermes):
    def __init__(self, needed: int) -> None: ...


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("xml", "allowed: hermes, code"),
        (f"{__name__}:ADD", "is not a class"),
        (f"{__name__}:Unfinished", "lacks find, wrap"),
        (f"{__name__}:Demanding", "needed"),
    ],
)
def test_what_is_no_format_is_a_user_error(name: str, message: str) -> None:
    with pytest.raises(UserError, match=f"episode.call_format = .*{message}"):
        make_format(name)
