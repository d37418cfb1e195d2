"""Call formats: how a model writes a tool call in a turn, and how the model gets its result."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

from common.config.generator import MAX_CALLS
from common.errors import UserError
from common.plugins import load_object

# Limits of one turn, beside `MAX_CALLS`.
MAX_CALL = 1 << 16  # characters of one call
MAX_TAGS = 4 * MAX_CALLS  # opening tags of a turn that are read

CALL, CALL_END = "<tool_call>", "</tool_call>"
CODE, CODE_END = "<code>", "</code>"
THINK, THINK_END = "<think>", "</think>"
FENCE = "```"
NOT_JSON = "error: the tool call is not valid JSON"
_SPACE = re.compile(r"[ \t\n\r]*")
_CALL_OR_THINK = re.compile(f"{CALL}|{THINK}")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call; if it could not be read, `error` says why and is sent back to the model."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str = ""


class CallFormat(Protocol):
    """How calls are written and answered. One object serves all episodes of a generator.

    Attributes:
        stop: strings that end a turn as the end-of-turn token does; they stay part of the turn.
        wrap: if None, a result is a message of role `tool`, rendered by the model's chat template. If two strings, a
            result is put between them and appended as it is, inside the assistant's own turn.
    """

    stop: Sequence[str]
    wrap: tuple[str, str] | None

    def find(self, text: str) -> list[ToolCall]:
        """The calls of one assistant turn, in order; `text` may be anything and lacks the end-of-turn token.

        Runs on the event loop for short turns, in a thread for long ones, and so must be linear in the text.
        Calls after the first one beyond `MAX_CALLS` are neither read nor run.
        """


class Hermes:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number in a turn; results are `tool` messages."""

    stop: tuple[str, ...] = ()
    wrap = None

    def find(self, text: str) -> list[ToolCall]:
        """The calls of a turn, in order.

        Tags inside the JSON's own strings belong to the JSON. Of nested tags the innermost counts. A call whose
        closing tag is missing counts if its JSON is complete; otherwise it is not a call.
        """
        calls: list[ToolCall] = []
        position = close = 0
        for _ in range(MAX_TAGS):
            start = text.find(CALL, position)
            if start < 0 or len(calls) > MAX_CALLS:
                break
            position = _after_space(text, start + len(CALL))
            value, end = _json_at(text, position)
            following = _after_space(text, end)
            if value is not None and (following == len(text) or text.startswith((CALL_END, CALL), following)):
                calls.append(_json_call(value))
                position = end
                continue
            if 0 <= close < position:
                close = text.find(CALL_END, position)
            # A tag without a closing tag of its own, or around another call, is plain text.
            if close >= 0 and text.find(CALL, position, close) < 0:
                is_long = close - position > MAX_CALL
                error = f"error: the tool call is longer than {MAX_CALL} characters" if is_long else NOT_JSON
                calls.append(ToolCall("", error=error))
                position = close
        return calls


def without_thinking(text: str, opened: bool = False) -> str:
    """A turn without its thinking: the text between <think> and </think>, or after a <think> that is never closed.

    A tag within the JSON of a call is part of the call. Takes time linear in the text; what follows `MAX_TAGS` tags is
    dropped.

    Args:
        opened: whether the turn begins within thinking.
    """
    kept: list[str] = []
    start = position = _after_thinking(text, 0) if opened else 0
    for _ in range(MAX_TAGS):
        tag = _CALL_OR_THINK.search(text, position)
        if tag is None:
            return "".join([*kept, text[start:]])
        if tag.group() == CALL:
            _, position = _json_at(text, _after_space(text, tag.end()))
        else:
            kept.append(text[start : tag.start()])
            start = position = _after_thinking(text, tag.end())
    return "".join([*kept, text[start:position]])


def _after_thinking(text: str, position: int) -> int:
    end = text.find(THINK_END, position)
    return len(text) if end < 0 else end + len(THINK_END)


def _after_space(text: str, position: int) -> int:
    space = _SPACE.match(text, position)
    return space.end() if space else position


def _json_at(text: str, position: int) -> tuple[Any, int]:
    """The JSON value at a position and where it ends; None if there is none."""
    try:
        # A slice keeps this linear: a decoding error counts the lines from the start of its text.
        value, length = _DECODER.raw_decode(text[position : position + MAX_CALL])
    except (ValueError, RecursionError):
        return None, position
    return value, position + length


def _json_call(value: Any) -> ToolCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return ToolCall("", error='error: a tool call is {"name": ..., "arguments": {...}}')
    try:
        # JSON can contain unpaired surrogates, which cannot be encoded.
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


class CodeBlocks:
    """Programs between <code> tags, answered by <interpreter> in the same turn.

    Each block is a call of `code_interpreter`. A turn pauses after its first block and continues after the output.
    """

    stop = (CODE_END,)
    wrap = ("<interpreter>\n", "\n</interpreter>\n\n")

    def find(self, text: str) -> list[ToolCall]:
        """The programs of a turn as the model wrote them, without fences; an unterminated block does not count."""
        calls: list[ToolCall] = []
        end = 0
        while len(calls) <= MAX_CALLS:
            start = text.find(CODE, end)
            end = text.find(CODE_END, start) if start >= 0 else -1
            if end < 0:
                break
            calls.append(ToolCall("code_interpreter", {"code": _unfenced(text[start + len(CODE) : end])}))
            end += len(CODE_END)
        if not calls and text.rstrip().endswith(CODE_END):
            # The closing tag has ended the turn, so this is an incomplete call and not an answer.
            calls.append(ToolCall("", error=f"error: {CODE_END} without {CODE}"))
        return calls


def _unfenced(block: str) -> str:
    block = block.strip()
    if block.startswith(FENCE):
        block = block.removeprefix(FENCE).removeprefix("python")
    return block.removesuffix(FENCE).strip()


BUILTIN: dict[str, Any] = {"hermes": Hermes, "code": CodeBlocks}


def make_format(name: str) -> CallFormat:
    """The format that `episode.call_format` names; raises `UserError`."""
    made = load_object(name, BUILTIN, "episode.call_format")
    if not isinstance(made, type):
        raise UserError(f"episode.call_format = {name!r} is not a class")
    try:
        call_format: CallFormat = made()
    except TypeError as error:
        raise UserError(f"episode.call_format = {name!r} cannot be made without arguments: {error}") from None
    except Exception as error:  # whatever a user's class raises
        raise UserError(f"episode.call_format = {name!r} cannot be made: {type(error).__name__}: {error}") from None
    missing = [part for part in ("find", "stop", "wrap") if not hasattr(call_format, part)]
    if missing:
        raise UserError(f"episode.call_format = {name!r} lacks {', '.join(missing)}; docs/extending.md has an example")
    stop, wrap = call_format.stop, call_format.wrap
    if not _are_texts(stop):  # the letters of a text would each end a turn
        raise UserError(f"episode.call_format = {name!r}: stop = {stop!r} must be a list of strings that are not empty")
    if wrap is not None and not (_are_texts(wrap, may_be_empty=True) and len(wrap) == 2):
        raise UserError(f"episode.call_format = {name!r}: wrap = {wrap!r} must be None or two strings")
    return call_format


def _are_texts(value: Any, may_be_empty: bool = False) -> bool:
    is_list = isinstance(value, Collection) and not isinstance(value, str)
    return is_list and all(isinstance(text, str) and (text or may_be_empty) for text in value)
