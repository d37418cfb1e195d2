"""Simulated users: how a conversation goes and ends, those that come with it, and how they are configured."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import structlog

from generator.episode.parts import EpisodeParts
from generator.rewards import Outcome
from generator.users import BadUserTurn, Checker, UserTurn, Verdict, conversation
from generator.users.base import MAX_TEXT
from generator.users.corrector import Corrector
from generator.users.llm import LlmUser, other_side
from generator.users.scripted import Scripted, read_dialogue
from tests.support.episode import PROMPT, configured, talk
from tests.support.event_loop import in_event_loop
from tests.support.http_double import says, serve
from tests.support.users import RecordingUser

REWARDS = "tests.support.some_rewards"


def test_a_conversation_starts_responds_and_finishes() -> None:
    user = RecordingUser()
    assert talk(user, "4", row={"a": 1}) == [UserTurn(False, "to 4")]
    assert user.started == {"row": {"a": 1}, "answer": "4", "messages": PROMPT}
    assert user.calls == ["start", "respond", "finish", "finished"]
    # A plain tuple and a number of numpy's will do, and long text is cut.
    assert talk(RecordingUser(turn=(False, "a", np.float32(0.5))), "4") == [UserTurn(False, "a", 0.5, {})]
    assert talk(RecordingUser(turn=(False, "x" * 10_000_000, 1)), "4") == [UserTurn(False, "x" * MAX_TEXT, 1.0, {})]
    for turn in (
        None,
        (True, "a", 1.0, {}, 5),
        (False, "a", float("nan"), {}),
        (False, "a", True, {}),
        (False, b"a"),
        (False, "a", 10**400, {}),
        (False, "a", np.zeros(2), {}),
        ("no", "a"),
        {"stop": False, "text": "a"},
        "OK",
    ):
        with pytest.raises(BadUserTurn):
            talk(RecordingUser(turn=turn), "4")
    with structlog.testing.capture_logs() as logs:  # a failing end changes nothing
        assert talk(RecordingUser(finish=OSError("disk full")), "4") == [UserTurn(False, "to 4")]
    assert [line["what"] for line in logs] == ["simulated user"]


@in_event_loop
async def test_the_data_stays_as_it_is_whatever_a_user_changes() -> None:
    class Changing(RecordingUser):
        async def start(self, episode_id: str, **kwargs: Any) -> None:
            await super().start(episode_id, **kwargs)
            kwargs["row"].clear()
            kwargs["messages"].append({"role": "user", "content": "more"})

        async def respond(self, episode_id: str, messages: list[dict[str, Any]]) -> Any:
            messages[0]["content"] = "changed"
            return await super().respond(episode_id, messages)

    row, messages = {"a": [1]}, [{"role": "user", "content": "Hi"}]
    async with conversation(Changing(), "e", row=row, messages=messages) as talking:
        await talking.respond([*messages, {"role": "assistant", "content": "4"}])
    assert (row, messages) == ({"a": [1]}, [{"role": "user", "content": "Hi"}])


@pytest.mark.parametrize(
    ("where", "trouble", "words"),
    [("start", TimeoutError("no route"), "no route"), ("respond", "hang", "more than 0.01 s")],
)
def test_a_failing_user_is_finished(where: str, trouble: Any, words: str) -> None:
    user = RecordingUser(**{where: trouble})
    with pytest.raises(TimeoutError, match=words):
        talk(user, "4", timeout=0.01 if trouble == "hang" else 60)
    assert user.calls[-2:] == ["finish", "finished"]


@pytest.mark.parametrize("where", ["start", "finish"])
@in_event_loop
async def test_a_cancelled_conversation_is_finished_to_its_end(where: str) -> None:
    user = RecordingUser(**{where: "hang"})

    async def talking() -> None:
        async with conversation(user, "e") as talking:
            await talking.respond([{"role": "assistant", "content": "4"}])

    episode = asyncio.create_task(talking())
    await user.entered.wait()
    for _ in range(3 if where == "finish" else 1):
        episode.cancel()
        await asyncio.sleep(0)
    assert where != "finish" or not episode.done()
    user.release.set()
    with pytest.raises(asyncio.CancelledError):
        await episode
    assert user.calls[-1] == "finished"


async def exact(text: str, answer: Any, row: dict[str, Any]) -> Verdict:
    """Half right if it is only in the text."""
    score = 1.0 if text == str(answer) else 0.5 if str(answer) in text else 0.0
    return Verdict(score, "It is 50% right." if score == 0.5 else "")


AGAIN = "That is not right. Please try again."
HALF = "That is not right. It is 50% right. Please try again."


@pytest.mark.parametrize(
    ("options", "replies", "rewards", "texts"),
    [
        ({}, ["5", "4 or 5", "4"], [0.0] * 3, [AGAIN, HALF, ""]),
        ({"turns": 2}, ["1", "2", "3"], [0.0] * 3, [AGAIN, AGAIN, ""]),
        ({"discount": 0.5}, ["5", "5", "4"], [0, 0, -0.75], [AGAIN, AGAIN, ""]),
        ({"penalty": 0.25, "turns": 1}, ["5", "6"], [-0.25, -0.25], [AGAIN, ""]),
        ({"right_from": 0.5}, ["4 or 5"], [0.0], [""]),
        ({"message": "No!{finding}"}, ["5", "45", "4"], [0.0] * 3, ["No!", "No! It is 50% right.", ""]),
    ],
    ids=str,
)
def test_the_corrector_corrects_until_it_is_right(options: Any, replies: Any, rewards: Any, texts: Any) -> None:
    turns = talk(Corrector(exact, **options), *replies)
    assert [turn.text for turn in turns] == texts
    assert [turn.reward for turn in turns] == rewards
    assert [turn.stop for turn in turns] == [False] * (len(turns) - 1) + [True]
    findings = [turn.metadata.get("finding") for turn in turns]
    assert findings == ["It is 50% right." if "4" in reply and reply != "4" else None for reply in replies]


DIALOGUE = ["Double it.", {"text": "And once more.", "check": "16"}, {"text": "Half of that?", "check": 8}]
WORTH = [{"text": "Double it.", "check": "8", "reward": 0.2}, {"text": "Sure?", "check": None, "reward": None}]


@pytest.mark.parametrize(
    ("dialogue", "replies", "texts", "rewards"),
    [
        (DIALOGUE, ["4", "8", "16", "7"], ["Double it.", "And once more.", "Half of that?", ""], [0.0, 0.0, 0.5, 0.0]),
        (WORTH, ["4", "8", "yes"], ["Double it.", "Sure?", ""], [0, 0.2, 0]),
    ],
)
def test_the_script_says_its_lines_and_checks_replies(dialogue: Any, replies: Any, texts: Any, rewards: Any) -> None:
    turns = talk(Scripted(exact, column="lines"), *replies, row={"lines": dialogue})
    assert [turn.text for turn in turns] == texts
    assert [turn.stop for turn in turns] == [False] * (len(texts) - 1) + [True]
    assert [turn.reward for turn in turns] == rewards


def player(url: str = "http://127.0.0.1", **options: Any) -> LlmUser:
    user = LlmUser(base_url=url, model="tiny", persona="You are in a hurry.", **options)
    user.api._retries = replace(user.api._retries, first=0.0)
    return user


@pytest.mark.parametrize(("last", "most"), [("Thanks. [STOP]", 5), ("Really?", 1)])
def test_the_player_gets_its_persona_and_goal_and_ends_the_conversation(last: str, most: int) -> None:
    with serve(says("<think>hm</think> Are you sure?"), says(last)) as double:
        turns = talk(player(double.url, max_turns=most), "5", "4", row={"goal": "to know what 2+2 is"})
    assert [(turn.stop, turn.text) for turn in turns] == [(False, "Are you sure?"), (True, "")]
    assert len(double.requests) == min(2, most)
    request = double.requests[0]
    system, opening, *heard = request["messages"]
    assert (system["role"], opening["role"]) == ("system", "user")
    assert all(part in system["content"] for part in ("You are in a hurry.", "to know what 2+2 is", "[STOP]"))
    assert heard == [{"role": "assistant", "content": "2+2?"}, {"role": "user", "content": "5"}]
    assert (request["model"], request["max_tokens"]) == ("tiny", 256)


def test_the_player_sees_the_conversation_without_tool_calls() -> None:
    spoken = [("assistant", "<tool_call>...</tool_call>"), ("tool", "4")]
    spoken += [("assistant", "<think>easy</think>" + "x" * 100_000), ("user", "Shorter.")]
    spoken += [("assistant", "<think>hm</think>")]
    seen = other_side("play", [*PROMPT, *({"role": role, "content": text} for role, text in spoken)])
    assert [message["role"] for message in seen] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert [seen[3]["content"], seen[-1]["content"]] == ["x" * 8192, "(The assistant says nothing.)"]


def read(dialogue: Any) -> Callable[[], Any]:
    return lambda: read_dialogue({"dialogue": dialogue}, "dialogue")


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        (read(None), "column 'dialogue'.*as a list, got nothing"),
        (read(["a", {"check": 4}]), "line 2: the text is missing"),
        (read([{"text": "a", "reward": "much"}]), "line 1: reward = 'much' is not a number"),
        (read([{"text": "a", "reward": float("nan")}]), "line 1: reward = nan is not a number"),
        (read([{"text": "a", "reward": float("inf")}]), "line 1: reward = inf is not a number"),
        (lambda: talk(player(), "4", row={"goal": " "}), "column 'goal' must say"),
    ],
)
def test_a_row_that_does_not_fit_is_named(made: Callable[[], Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        made()


class OwnUser(RecordingUser):
    def __init__(self, greeting: str, checker: Checker) -> None:
        super().__init__(turn=(False, greeting))
        self._check = checker

    async def close(self) -> None:
        self.calls.append("closed")


@pytest.mark.integration
@pytest.mark.parametrize(
    ("reward", "options", "verdicts"),
    [
        ("boxed", {}, {"so \\boxed{4}": Verdict(1.0), "4": Verdict(0.0), " ": Verdict(0.0, "There was no answer.")}),
        ({"boxed": 1.0, "exact": 1.0}, {"checker": f"{REWARDS}:half"}, {"4": Verdict(0.5, "It is 50% right.")}),
    ],
)
@in_event_loop
async def test_the_checker_is_the_runs_reward_or_another(reward: Any, options: Any, verdicts: Any) -> None:
    wide, options = {"sampler": {"tracker": {"reward_range": [-2.0, 2.0]}}}, {"greeting": "hello"} | options
    parts = EpisodeParts(configured(wide, user=f"{__name__}:OwnUser", user_options=options, reward=reward))
    own: Any = parts.user
    async with conversation(own, "e") as talking:
        assert (await talking.respond(PROMPT)).text == "hello"
    assert {text: await own._check(text, "4", {}) for text in verdicts} == verdicts
    value = (await parts.scorer.score(Outcome(text="4", answer="4"))).value
    assert value == (0.0 if reward == "boxed" else 1.0), "the run's own stays"
    await parts.close()
    assert own.calls[-1] == "closed"


@pytest.mark.parametrize("user", [Corrector(exact), Scripted(exact)], ids=["corrector", "scripted"])
def test_conversations_do_not_mix_and_leave_nothing(user: Any) -> None:
    async def one(number: int) -> str:
        row = {"dialogue": [f"is it {number}?"]}
        async with conversation(user, f"e{number}", row=row, answer=number, messages=PROMPT) as talking:
            await asyncio.sleep(0)
            turn = await talking.respond([{"role": "assistant", "content": str(number)}])
            assert turn.stop == isinstance(user, Corrector)
            return turn.text

    async def many() -> list[str]:
        return await asyncio.gather(*(one(number) for number in range(1, 51)))

    assert asyncio.run(many()) in ([""] * 50, [f"is it {number}?" for number in range(1, 51)])
    assert not next(value for value in vars(user).values() if isinstance(value, dict))
