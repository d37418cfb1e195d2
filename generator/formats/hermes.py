"""JSON between <tool_call> tags, as Hermes and Qwen models write calls."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NoReturn

from generator.formats.base import MAX_CALLS, ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MAX_CALL = 1 << 16  # characters of one call
MAX_TAGS = 4 * MAX_CALLS  # opening tags of a turn that are looked at

NOT_JSON = "error: the tool call is not valid JSON"
_SPACE = re.compile(r"[ \t\n\r]*")


class Hermes:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number in a turn; results are `tool` messages."""

    stop: tuple[str, ...] = ()
    wrap = None

    def find(self, text: str) -> list[ToolCall]:
        """The calls of a turn, in order.

        Tags inside the JSON's own strings belong to the JSON. Of nested tags the innermost counts. A call whose
        closing tag is missing counts if its JSON is complete; otherwise it is no call.
        """
        return list(_calls(text))


def _calls(text: str) -> Iterator[ToolCall]:
    position = count = close = 0
    for _ in range(MAX_TAGS):
        start = text.find(OPEN, position)
        if start < 0 or count > MAX_CALLS:
            return
        position = _after_space(text, start + len(OPEN))
        value, end = _json_at(text, position)
        following = _after_space(text, end)
        if value is not None and (following == len(text) or text.startswith((CLOSE, OPEN), following)):
            count += 1
            yield _call(value)
            position = end
            continue
        if 0 <= close < position:
            close = text.find(CLOSE, position)
        # Without a closing tag of its own, or around another call, it is plain text.
        if close >= 0 and text.find(OPEN, position, close) < 0:
            count += 1
            long = close - position > MAX_CALL
            yield ToolCall("", error=f"error: the tool call is longer than {MAX_CALL} characters" if long else NOT_JSON)
            position = close


def _after_space(text: str, position: int) -> int:
    space = _SPACE.match(text, position)
    return space.end() if space else position


def _json_at(text: str, position: int) -> tuple[Any, int]:
    """The JSON value at a position and where it ends; None where there is none."""
    try:
        # A slice: an error's text counts lines from the start of what was given.
        value, length = _DECODER.raw_decode(text[position : position + MAX_CALL])
    except (ValueError, RecursionError):
        return None, position
    return value, position + length


def _call(value: Any) -> ToolCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return ToolCall("", error='error: a tool call is {"name": ..., "arguments": {...}}')
    try:
        # JSON can contain half surrogate pairs, which cannot be encoded.
        json.dumps(value, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError):
        return ToolCall("", error=NOT_JSON)
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict):
        return ToolCall(value["name"], error="error: arguments must be an object")
    return ToolCall(value["name"], arguments)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)
