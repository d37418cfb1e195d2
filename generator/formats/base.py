"""The interface of a call format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

# What one turn may ask for. A model can write a call of a few tokens some thousand times in a turn.
MAX_CALLS = 32


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call; where it could not be read, `error` says why and is what the model gets back."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str = ""


class CallFormat(Protocol):
    """How calls are written and answered. One object serves all episodes of a generator.

    Attributes:
        stop: strings that end a turn as the end-of-turn token does; they stay part of the turn.
        wrap: None: a result is a message of role `tool`, rendered by the model's chat template. Two strings:
            a result is put between them and appended as it is, inside the assistant's own turn.
    """

    stop: Sequence[str]
    wrap: tuple[str, str] | None

    def find(self, text: str) -> list[ToolCall]:
        """The calls of one assistant turn, in order; `text` is any text at all, without the end-of-turn token.

        Runs on the event loop for short turns, in a thread for long ones, and so must be linear in the text.
        Calls after the first one beyond `MAX_CALLS` are neither read nor run.
        """
        ...
