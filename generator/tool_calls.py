"""Finds tool calls in what the model wrote (Hermes format: JSON between <tool_call> tags)."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call; where it could not be read, `error` says why and is what the model gets back."""

    name: str
    arguments: dict[str, Any]
    error: str = ""


def find_calls(text: str) -> list[ToolCall]:
    """All complete calls of a turn, in order."""
    return [_parse(match.group(1)) for match in _CALL.finditer(text)]


def _parse(body: str) -> ToolCall:
    try:
        call = json.loads(body)
    except (ValueError, RecursionError):
        return ToolCall("", {}, "error: the tool call is not valid JSON")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall("", {}, 'error: a tool call is {"name": ..., "arguments": {...}}')
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return ToolCall(call["name"], {}, "error: arguments must be an object")
    return ToolCall(call["name"], arguments)
