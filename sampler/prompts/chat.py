"""Normalises the chat messages of data sets: joins text parts, and removes the nulls that Arrow adds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Messages = list[dict[str, Any]]

TEXT_PARTS = ("text", "input_text", "output_text")


class NotAMessage(Exception):
    """A message that chat templates cannot render; the text names the message and the reason."""


def plain_messages(messages: list[Any]) -> Messages:
    """The messages of a row, each with a role and text; raises `NotAMessage`.

    A message may be empty, except the user's. Only beside `tool_calls` may the content be null.
    """
    plain = [_plain(message, number) for number, message in enumerate(messages, 1)]
    if not any((message["content"] or "").strip() for message in plain):
        raise NotAMessage("all messages are empty")
    return plain


def _plain(message: Any, number: int) -> dict[str, Any]:
    name = f"message {number}"
    if not isinstance(message, Mapping):
        raise NotAMessage(f"{name} is a {type(message).__name__}, and not a role and content")
    # Arrow gives each message all keys that occur in any of them.
    plain: dict[str, Any] = without_nulls(message)
    role, content = plain.get("role"), plain.get("content")
    if not isinstance(role, str) or not role:
        keys = ", ".join(map(str, plain)) or "none"
        raise NotAMessage(f"{name} has no role; its keys are {keys}, and a message needs role and content")
    calls = plain.get("tool_calls", [])
    if not (isinstance(calls, list) and all(isinstance(call, Mapping) for call in calls)):
        raise NotAMessage(f"{name} ({role}) has tool_calls of type {type(calls).__name__}, and not a list of calls")
    if isinstance(content, list):
        content = _joined(content, name)
    if content is None and plain.get("tool_calls"):
        return plain | {"content": None}
    if not isinstance(content, str):
        kind = "no content" if content is None else f"content of type {type(content).__name__}, and not text"
        raise NotAMessage(f"{name} ({role}) has {kind}")
    if role == "user" and not content.strip():
        raise NotAMessage(f"{name} ({role}) is empty")
    return plain | {"content": content}


def without_nulls(value: Any) -> Any:
    """Plain data without keys whose value is null, at any depth."""
    if isinstance(value, Mapping):
        return {name: without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _joined(parts: list[Any], name: str) -> str:
    """The text of content that is a list of parts."""
    texts = []
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
        if kind not in TEXT_PARTS:
            raise NotAMessage(f"{name} has a part of type {str(kind)[:40]!r}; only parts of type 'text' can be read")
        if not isinstance(part.get("text"), str):
            raise NotAMessage(f"{name} has a part of type {kind!r} without text")
        texts.append(part["text"])
    return "".join(texts)
