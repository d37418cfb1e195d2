"""The part of a tool's result that the model sees."""

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
    """The text with `?` for half surrogate pairs, which tokenizers and messages cannot encode."""
    return text.encode("utf-8", "replace").decode()


def in_short(error: BaseException) -> str:
    """An exception as one short line."""
    return " ".join(f"{type(error).__name__}: {error}"[:200].split()).rstrip(":")
