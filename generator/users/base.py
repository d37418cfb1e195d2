"""The interface of a simulated user, and one episode's conversation with it, which is always finished."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from common.messages import Failure
from generator.chat.template import Message
from generator.concurrency import TimedOut, close_all, with_timeout

MAX_TEXT = 16_384  # characters


class UserTurn(NamedTuple):
    """The user's reply to an assistant's turn.

    Attributes:
        stop: the conversation is over; `text` is then not shown to the model.
        text: what the user says, as text of the chat message.
        reward: reward of the assistant's turn just answered; `episode.turn_rewards` says how it joins the score.
        metadata: anything worth keeping with the episode; plain values.
    """

    stop: bool
    text: str = ""
    reward: float = 0.0
    metadata: dict[str, Any] = {}  # noqa: RUF012 (never written to)


class UserSimulator(Protocol):
    """One object serves all episodes of a generator at once, and keeps the state of each by `episode_id`.

    An exception from `start` or `respond` is an infrastructure failure: the task is tried again, then skipped.

    A simulator may have `rewards = False`: its turns never have a reward. The last answer before a limit is then not
    passed to it.
    """

    async def start(self, episode_id: str, **kwargs: Any) -> None:
        """Begin an episode.

        kwargs: `row` (the data row's other columns), `answer` (the reference answer) and `messages` (the chat
        messages of the prompt); others may be added, so accept `**_` too.
        """
        ...

    async def respond(self, episode_id: str, messages: list[dict[str, Any]]) -> UserTurn:
        """Answer the assistant; `messages` is the conversation so far and ends with the assistant's turn.

        Called after every turn that the assistant ended without a call; for an episode's last allowed turn, only the
        reward counts. Each message has `role` (system, user, assistant, tool) and `content` (text).
        """
        ...

    async def finish(self, episode_id: str) -> None:
        """Forget an episode, however it ended; called once per episode, even if `start` failed."""
        ...


class Verdict(NamedTuple):
    """A checker's score of an answer, and a finding that may be shown to the model."""

    score: float
    finding: str = ""


# answer text, reference answer, the data row's other columns -> verdict
Checker = Callable[[str, Any, dict[str, Any]], Awaitable[Verdict]]


class BadUserTurn(Exception):
    """A simulator returned something other than a user's turn."""

    failure = Failure.BAD_USER_TURN


def last_answer(messages: list[Message]) -> str:
    """Text of the assistant's newest turn; empty if there is none."""
    return next((str(message["content"] or "") for message in reversed(messages) if message["role"] == "assistant"), "")


def checked(turn: Any) -> UserTurn:
    """The turn with its text cut to `MAX_TEXT` characters; raises `BadUserTurn` if it is not a turn."""
    try:
        stop, text, reward, metadata = UserTurn(*turn)
        reward = reward.item() if hasattr(reward, "item") else reward  # numpy's and torch's
    except (TypeError, ValueError, RuntimeError):
        raise BadUserTurn(f"expected (stop, text, reward, metadata), got {_short(turn)}") from None
    if not is_finite(reward):
        raise BadUserTurn(f"the reward of a user's turn must be a finite number, got {_short(reward)}")
    # Of text and of a mapping, `UserTurn` has taken the characters and the keys.
    wrong = isinstance(turn, str | Mapping) or isinstance(stop, str)
    if wrong or not isinstance(text, str) or not isinstance(metadata, dict):
        raise BadUserTurn(f"a user's turn is (bool, str, float, dict), got {_short(turn)}")
    return UserTurn(bool(stop), text[:MAX_TEXT], float(reward), metadata)


def is_finite(value: Any) -> bool:
    """Whether a value is a number that a float can hold, and no boolean."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) <= sys.float_info.max


def _short(value: Any) -> str:
    return repr(value)[:200]


RESPOND_SECONDS = 300.0  # an LLM that plays the user may be slow; its own limits are tighter


@dataclass(frozen=True, slots=True)
class Conversation:
    """A simulated user after the `start` of one episode."""

    user: UserSimulator
    episode_id: str
    timeout: float

    async def respond(self, messages: list[Message]) -> UserTurn:
        """The user's answer to the assistant's newest turn; raises `TimeoutError`, `BadUserTurn` or the user's own."""
        answering = self.user.respond(self.episode_id, deepcopy(messages))
        return checked(await _in_time(answering, self.timeout, "respond"))


@asynccontextmanager
async def conversation(
    user: UserSimulator, episode_id: str, *, timeout: float = RESPOND_SECONDS, **kwargs: Any
) -> AsyncIterator[Conversation]:
    """Start a conversation; `kwargs` (row, answer, messages) go to the simulator's `start`.

    The simulator gets copies: it may keep and change them, and the next attempt at the task needs the data's own.
    On exit, `finish` runs to its end (or for `CLOSE_SECONDS`): after success, an error, a timeout or a cancellation,
    also of `start` itself. What `finish` raises is logged and changes no result.
    """
    try:
        await _in_time(user.start(episode_id, **deepcopy(kwargs)), timeout, "start")
        yield Conversation(user, episode_id, timeout)
    finally:
        await close_all({"simulated user": lambda: user.finish(episode_id)})


async def _in_time(call: Any, seconds: float, name: str) -> Any:
    try:
        return await with_timeout(seconds, call)
    except TimedOut:
        raise TimeoutError(f"the simulated user's {name} took more than {seconds:g} s") from None
