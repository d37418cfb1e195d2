"""The messages of an episode's record, one after another, for whoever shows them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple


class Turn(NamedTuple):
    """One message.

    Attributes:
        role: assistant, tool, user or system.
        about: the assistant's turn by number, a tool's call, a user's reward; `prompt`: it came before the episode.
        text: as the model, tool or user wrote it, unescaped.
    """

    role: str
    about: str
    text: str


def turns(episode: dict[str, Any]) -> Iterator[Turn]:
    """The prompt's messages, then those that followed; what is no message is left out."""
    for message in _prompt(episode.get("input")):
        yield Turn(str(message.get("role")), "prompt", plain(message.get("content")))
    count = 0
    for message in _mappings(episode.get("messages")):
        role = str(message.get("role"))
        count += role == "assistant"
        yield Turn(role, _about(message, count), plain(message.get("content")))


def plain(value: Any) -> str:
    """A text as it is; anything else as JSON, but for nothing."""
    return "" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def number(value: Any) -> str:
    """A number with four digits; a dash for what is none."""
    return "–" if not isinstance(value, int | float) else f"{value:.4g}"


def _about(message: dict[str, Any], turn: int) -> str:
    if message.get("role") == "assistant":
        return f"turn {turn}"
    if message.get("role") == "tool":
        failed = "failed: " if message.get("error") else ""
        return f"{failed}{message.get('name')} {plain(message.get('arguments'))}"
    about = f"reward {number(message.get('reward', 0.0))}"
    return f"{about}, {plain(message['metadata'])}" if message.get("metadata") else about


def _prompt(prompt: Any) -> list[dict[str, Any]]:
    return _mappings(prompt) if isinstance(prompt, list) else [{"role": "user", "content": prompt}]


def _mappings(items: Any) -> list[dict[str, Any]]:
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []
