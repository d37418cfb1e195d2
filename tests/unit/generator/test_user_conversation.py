"""A conversation with a simulated user: whatever happens in it, it is finished, once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import structlog

from generator import concurrency
from generator.users import BadUserTurn, UserTurn, conversation
from generator.users.base import MAX_TEXT


class Recorder:
    """Writes down what it is asked; each call may be made to fail or to hang."""

    def __init__(self, **troubles: Any) -> None:
        self.troubles = troubles
        self.calls: list[str] = []
        self.told: dict[str, Any] = {}
        self.entered = asyncio.Event()
        self.release = asyncio.Event()

    async def start(self, episode_id: str, **kwargs: Any) -> None:
        self.told = kwargs
        await self._meet("start")

    async def respond(self, episode_id: str, messages: list[dict[str, Any]]) -> Any:
        await self._meet("respond")
        return self.troubles.get("turn", UserTurn(False, f"to {messages[-1]['content']}"))

    async def finish(self, episode_id: str) -> None:
        await self._meet("finish")
        self.calls.append("finished")

    async def _meet(self, name: str) -> None:
        self.calls.append(name)
        trouble = self.troubles.get(name)
        if isinstance(trouble, Exception):
            raise trouble
        if trouble == "hang":
            self.entered.set()
            await self.release.wait()


SAID = [{"role": "assistant", "content": "4"}]


async def talk(user: Recorder, **kwargs: Any) -> UserTurn:
    async with conversation(user, "e", row={"a": 1}, answer="4", messages=SAID, **kwargs) as talking:
        return await talking.respond(SAID)


def test_the_user_hears_of_the_row_the_answer_and_the_messages() -> None:
    async def scene() -> None:
        user = Recorder()
        assert await talk(user) == UserTurn(False, "to 4")
        assert user.told == {"row": {"a": 1}, "answer": "4", "messages": SAID}
        assert user.calls == ["start", "respond", "finish", "finished"]

    asyncio.run(scene())


@pytest.mark.parametrize("where", ["start", "respond"])
def test_a_failing_user_is_finished_and_its_error_is_raised(where: str) -> None:
    async def scene() -> None:
        user = Recorder(**{where: ConnectionError("endpoint is gone")})
        with pytest.raises(ConnectionError, match="endpoint is gone"):
            await talk(user)
        assert user.calls[-2:] == ["finish", "finished"]

    asyncio.run(scene())


@pytest.mark.parametrize("where", ["start", "respond"])
def test_a_hanging_user_is_given_up_and_finished(where: str) -> None:
    async def scene() -> None:
        user = Recorder(**{where: "hang"})
        with pytest.raises(TimeoutError, match=f"{where} took more than 0.01 s"):
            await talk(user, timeout=0.01)
        assert user.calls[-2:] == ["finish", "finished"]

    asyncio.run(scene())


def test_a_users_own_timeout_keeps_its_words() -> None:
    with pytest.raises(TimeoutError, match="no route"):
        asyncio.run(talk(Recorder(respond=TimeoutError("no route"))))


@pytest.mark.parametrize("where", ["start", "respond"])
def test_a_cancelled_episode_is_finished(where: str) -> None:
    async def scene() -> None:
        user = Recorder(**{where: "hang"})
        episode = asyncio.create_task(talk(user))
        await user.entered.wait()
        episode.cancel()
        with pytest.raises(asyncio.CancelledError):
            await episode
        assert user.calls[-2:] == ["finish", "finished"]

    asyncio.run(scene())


def test_cancelling_again_while_it_finishes_does_not_cut_it_short() -> None:
    async def scene() -> None:
        user = Recorder(finish="hang")
        episode = asyncio.create_task(talk(user))
        await user.entered.wait()
        for _ in range(3):
            episode.cancel()
            await asyncio.sleep(0)
        assert not episode.done()
        user.release.set()
        with pytest.raises(asyncio.CancelledError):
            await episode
        assert user.calls[-1] == "finished"

    asyncio.run(scene())


def test_a_finish_that_fails_is_logged_and_changes_nothing() -> None:
    async def scene() -> None:
        with structlog.testing.capture_logs() as logs:
            assert await talk(Recorder(finish=OSError("disk full"))) == UserTurn(False, "to 4")
        assert [(line["log_level"], line["error"]) for line in logs] == [("warning", "OSError: disk full")]

    asyncio.run(scene())


def test_a_finish_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(concurrency, "CLOSE_SECONDS", 0.01)
    with structlog.testing.capture_logs() as logs:
        assert asyncio.run(talk(Recorder(finish="hang"))) == UserTurn(False, "to 4")
    assert (logs[0]["what"], logs[0]["error"]) == ("simulated user", "no end within 0.01 s")


@pytest.mark.parametrize(
    "turn",
    [None, "text", (True, "a", 1.0, {}, 5), (False, "a", float("nan"), {}), (False, "a", True, {}), (False, b"a")],
)
def test_what_is_no_user_turn_is_refused(turn: Any) -> None:
    with pytest.raises(BadUserTurn):
        asyncio.run(talk(Recorder(turn=turn)))


def test_a_plain_tuple_will_do_and_long_text_is_cut() -> None:
    turn = asyncio.run(talk(Recorder(turn=(False, "x" * 10_000_000, 1))))
    assert turn == UserTurn(False, "x" * MAX_TEXT, 1.0, {})
