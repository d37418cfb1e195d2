"""A user whose lines are in the data set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from generator.chat.template import Message
from generator.users.base import Checker, UserTurn, is_finite, last_answer


@dataclass(frozen=True, slots=True)
class DialogueLine:
    """A line of the user, and the reference answer of the reply to it, if that is checked."""

    text: str
    check: Any
    reward: float


@dataclass(slots=True)
class _Scene:
    lines: list[DialogueLine]
    row: dict[str, Any]
    next_line: int = 0


class Scripted:
    """Says the next line after each assistant's turn, and stops after the reply to the last.

    A row's dialogue is a list; each line is text, or a mapping: `text`, `check` (the reference answer of the reply
    to this line, for the checker) and `reward` (what a reply of full score is worth; by default all checked
    replies of a dialogue are worth 1 together).

    Args:
        checker: scores the replies to lines with a `check`; the score times `reward` is the turn's reward.
        column: column of the data row with the dialogue.
    """

    def __init__(self, checker: Checker, *, column: str = "dialogue") -> None:
        self._check = checker
        self._column = column
        self._scenes: dict[str, _Scene] = {}

    async def start(self, episode_id: str, *, row: dict[str, Any], **_: Any) -> None:
        """Read the row's dialogue; raises `ValueError` if it is not valid."""
        self._scenes[episode_id] = _Scene(read_dialogue(row, self._column), row)

    async def respond(self, episode_id: str, messages: list[Message]) -> UserTurn:
        """Check the reply to the last line, and say the next."""
        scene = self._scenes[episode_id]
        reward, metadata = 0.0, {}
        before = scene.lines[scene.next_line - 1] if scene.next_line else None
        if before is not None and before.check is not None:
            score, finding = await self._check(last_answer(messages), before.check, scene.row)
            reward = score * before.reward
            metadata = {"score": score} | ({"finding": finding} if finding else {})
        if scene.next_line == len(scene.lines):
            return UserTurn(True, reward=reward, metadata=metadata)
        scene.next_line += 1
        return UserTurn(False, scene.lines[scene.next_line - 1].text, reward, metadata)

    async def finish(self, episode_id: str) -> None:
        self._scenes.pop(episode_id, None)


def read_dialogue(row: dict[str, Any], column: str) -> list[DialogueLine]:
    """The lines of a data row; raises `ValueError` naming what is wrong."""
    dialogue = row.get(column)
    if not isinstance(dialogue, list):
        kind = "nothing" if dialogue is None else type(dialogue).__name__
        raise ValueError(f"column {column!r} must hold the user's lines as a list, got {kind}")
    items = [item if isinstance(item, dict) else {"text": item} for item in dialogue]
    checked = sum(item.get("check") is not None for item in items)
    lines = []
    for position, item in enumerate(items, 1):
        text, reward = item.get("text"), item.get("reward")
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"column {column!r}, line {position}: the text is missing")
        if reward is not None and not is_finite(reward):
            raise ValueError(f"column {column!r}, line {position}: reward = {reward!r} is not a number")
        lines.append(DialogueLine(text, item.get("check"), 1 / max(1, checked) if reward is None else float(reward)))
    return lines
