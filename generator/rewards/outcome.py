"""The input of a reward, a finished episode, and the result of scoring it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from common.answers import answer_text, normal_answer

MAX_ANSWER = 200  # characters


@dataclass(frozen=True, slots=True)
class Outcome:
    """What rewards see of a finished episode; plain data that can be sent to another process.

    Attributes:
        text: the last assistant turn; empty unless the model ended it and made no call.
        response: everything after the prompt, decoded without special tokens: all turns, tool and user text included.
        answer: the data row's reference answer. Numbers and booleans become text (`common.answers`); lists and mappings
            stay as they are.
        row: the data row's other columns.
        prompt: text, or chat messages.
        tokens: how many the model sampled.
        limit: `episode.max_response_tokens`.
        reason: why the episode ended.
        turn_rewards: what a simulated user gave for single turns, in order.
        reward: what an agent gave as its own reward, or the task's tests gave in its container.
        folder: path of the folder in which an agent has left its files; empty if there is none.
        opened: tags, such as <think>, with which the chat template begins the assistant's turns; not part of the texts.
        answer_column: name of the data's column with the reference answer; None if there is none.
    """

    text: str
    response: str = ""
    answer: Any = None
    row: dict[str, Any] = field(default_factory=dict)
    prompt: str | list[dict[str, Any]] = ""
    tokens: int = 0
    limit: int = 0
    reason: str = ""
    turn_rewards: Sequence[float] = ()
    reward: float | None = None
    folder: str = ""
    opened: str = ""
    answer_column: str | None = "answer"

    def __post_init__(self) -> None:
        # Nowhere else, since every reward and every checker gets its answer from an outcome.
        object.__setattr__(self, "answer", normal_answer(self.answer))

    @property
    def answer_text(self) -> str:
        """The reference answer as a text to compare with; lists and mappings as JSON."""
        return answer_text(self.answer)


@dataclass(frozen=True, slots=True)
class Score:
    """The reward of an episode.

    Attributes:
        value: the reward.
        parts: {name in `episode.reward`: value}, before the weights.
        final: the weighted sum of the parts, before rewards of single turns were added.
    """

    value: float
    parts: dict[str, float]
    final: float


def vote(answer: object) -> str:
    """An answer in the form that majority votes compare: one line of at most 200 characters.

    A longer one keeps its beginning and a hash, so that different answers stay different.
    """
    text = "" if answer is None else " ".join(str(answer).split()).encode(errors="backslashreplace").decode()
    if len(text) <= MAX_ANSWER:
        return text
    return f"{text[: MAX_ANSWER - 17]} {blake2b(text.encode(), digest_size=8).hexdigest()}"
