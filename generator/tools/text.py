"""What of a tool's result the model gets to see."""

from __future__ import annotations

from typing import Literal

MARK = "(truncated)"


def truncated(text: str, limit: int, keep: Literal["left", "middle", "right"]) -> str:
    """At most `limit` characters of a text, and a mark where some are missing."""
    if len(text) <= limit:
        return text
    if keep == "left":
        return f"{text[:limit]}...{MARK}"
    if keep == "right":
        return f"{MARK}...{text[len(text) - limit :]}"
    head = limit // 2
    return f"{text[:head]}...{MARK}...{text[len(text) - limit + head :]}"


def encodable(text: str) -> str:
    """The text with `?` for halves of characters, which tokenizers and messages cannot carry."""
    return text.encode("utf-8", "replace").decode()


def in_short(error: BaseException) -> str:
    """An exception as one short line."""
    return " ".join(f"{type(error).__name__}: {error}"[:200].split()).rstrip(":")
