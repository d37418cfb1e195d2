"""One episode's conversation with a simulated user, finished whatever happens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from generator.concurrency.closing import close_all
from generator.concurrency.timeout import TimedOut, with_timeout
from generator.text.template import Message
from generator.users.base import UserSimulator, UserTurn, checked

RESPOND_SECONDS = 300.0  # an LLM that plays the user may be slow; its own limits are tighter


@dataclass(frozen=True, slots=True)
class Conversation:
    """A simulated user after the `start` of one episode."""

    user: UserSimulator
    episode_id: str
    timeout: float

    async def respond(self, messages: list[Message]) -> UserTurn:
        """The user's answer to the assistant's newest turn.

        Raises:
            TimeoutError: it did not come in time.
            BadUserTurn: it is none.
            Exception: whatever the simulator raises.
        """
        return checked(await _in_time(self.user.respond(self.episode_id, messages), self.timeout, "respond"))


@asynccontextmanager
async def conversation(
    user: UserSimulator, episode_id: str, *, timeout: float = RESPOND_SECONDS, **kwargs: Any
) -> AsyncIterator[Conversation]:
    """Start a conversation; `kwargs` (row, answer, messages) go to the simulator's `start`.

    On the way out `finish` runs to its end (or for `CLOSE_SECONDS`) before anything else goes on: after success,
    error, timeout or cancellation, also of `start` itself. What `finish` raises is logged and changes no result.
    """
    try:
        await _in_time(user.start(episode_id, **kwargs), timeout, "start")
        yield Conversation(user, episode_id, timeout)
    finally:
        await close_all({"simulated user": lambda: user.finish(episode_id)})


async def _in_time(call: Any, seconds: float, name: str) -> Any:
    try:
        return await with_timeout(seconds, call)
    except TimedOut:
        raise TimeoutError(f"the simulated user's {name} took more than {seconds:g} s") from None
