"""The interface of a tool, and its errors."""

from __future__ import annotations

from typing import Any, Protocol

from common.messages import Failure


class ToolError(Exception):
    """The call was wrong or has no result: the model gets the text, and the episode continues."""


class ToolUnavailable(Exception):
    """Something a tool depends on failed (a server, the network): the task is tried again, then skipped."""

    failure = Failure.TOOL_UNAVAILABLE


class Session(Protocol):
    """A tool during one episode. A tool without state is its own session."""

    async def call(self, **arguments: Any) -> str:
        """The result as text; `arguments` fit the tool's schema.

        Several calls of one turn may run at once. An exception becomes a short error text that the model
        sees, except `ToolUnavailable`.
        """
        ...


class Tool(Protocol):
    """One object serves all episodes of a generator at once.

    A tool with separate state for each episode has `async def open(self, task: Task) -> Session` instead of
    `call`, and its sessions may have `async def close(self) -> None`, which runs however the episode ends.

    A tool may have `timeout`, in seconds: a call that takes longer is cut, and the model is told so. A call
    that takes longer than `episode.tool_timeout` is an infrastructure failure; the reason names the tool's `waits_for`,
    a text, if it has one.

    Attributes:
        name: the name by which the model calls it.
        description: what it does, for the model; one or two sentences.
        schema: JSON schema of its arguments, an object, as chat templates show it to the model.
    """

    name: str
    description: str
    schema: dict[str, Any]
