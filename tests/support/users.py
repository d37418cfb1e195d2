"""A simulated user that records its calls, and may fail or hang."""

from __future__ import annotations

import asyncio
from typing import Any

from generator.users import UserTurn


def echoes(messages: list[dict[str, Any]]) -> UserTurn:
    return UserTurn(False, f"to {messages[-1]['content']}")


class RecordingUser:
    """Gives `turn`, or what that function makes of the messages; `troubles` are an error or "hang" by method."""

    def __init__(self, turn: Any = echoes, **troubles: Any) -> None:
        self.turn, self.troubles = turn, troubles
        self.calls: list[str] = []
        self.started: dict[str, Any] = {}
        self.seen: list[list[dict[str, Any]]] = []
        self.finished: list[str] = []  # ids of episodes
        self.entered, self.release = asyncio.Event(), asyncio.Event()

    async def start(self, episode_id: str, **kwargs: Any) -> None:
        self.started = kwargs
        await self._meet("start")

    async def respond(self, episode_id: str, messages: list[dict[str, Any]]) -> Any:
        self.seen.append(messages)
        await self._meet("respond")
        return self.turn(messages) if callable(self.turn) else self.turn

    async def finish(self, episode_id: str) -> None:
        await self._meet("finish")
        self.calls.append("finished")
        self.finished.append(episode_id)

    async def _meet(self, name: str) -> None:
        self.calls.append(name)
        trouble = self.troubles.get(name)
        if isinstance(trouble, Exception):
            raise trouble
        if trouble == "hang":
            self.entered.set()
            await self.release.wait()
