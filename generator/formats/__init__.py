"""Call formats: how a model writes a tool call in a turn, and how the model gets its result."""

from __future__ import annotations

from typing import Any

from common.errors import UserError
from common.plugins import load_object
from generator.formats.base import MAX_CALLS, CallFormat, ToolCall
from generator.formats.code import CodeBlocks
from generator.formats.hermes import Hermes

__all__ = ["BUILTIN", "MAX_CALLS", "CallFormat", "CodeBlocks", "Hermes", "ToolCall", "make_format"]

BUILTIN: dict[str, Any] = {"hermes": Hermes, "code": CodeBlocks}


def make_format(name: str) -> CallFormat:
    """The format `episode.call_format` names; raises `UserError`."""
    made = load_object(name, BUILTIN, "episode.call_format")
    if not isinstance(made, type):
        raise UserError(f"episode.call_format = {name!r} is not a class")
    try:
        call_format: CallFormat = made()
    except TypeError as error:
        raise UserError(f"episode.call_format = {name!r} cannot be made without arguments: {error}") from None
    missing = [part for part in ("find", "stop", "wrap") if not hasattr(call_format, part)]
    if missing:
        raise UserError(f"episode.call_format = {name!r} lacks {', '.join(missing)}; docs/extending.md has an example")
    return call_format
