"""The simulated user that a configuration names, with his options and his checker."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from common.config import Config, parse_config
from common.errors import UserError
from generator.parts import EpisodeParts
from generator.rewards import Outcome
from generator.users import Checker, UserTurn, Verdict, conversation
from generator.users.corrector import Corrector
from generator.users.llm import LlmUser
from generator.users.scripted import Scripted

HERE = "tests.unit.generator.test_load_user"


class Own:
    """A user's own user."""

    def __init__(self, greeting: str, checker: Checker, loud: bool = False) -> None:
        self.greeting, self.check, self.closed = greeting, checker, False

    async def start(self, episode_id: str, **kwargs: Any) -> None: ...

    async def respond(self, episode_id: str, messages: list[dict[str, Any]]) -> UserTurn:
        return UserTurn(False, self.greeting)

    async def finish(self, episode_id: str) -> None: ...

    async def close(self) -> None:
        self.closed = True


class NoFinish:
    async def start(self, episode_id: str, **kwargs: Any) -> None: ...

    async def respond(self, episode_id: str, messages: list[dict[str, Any]]) -> UserTurn: ...


def half(text: str, answer: Any, row: dict[str, Any]) -> float:
    """A user's own reward; takes a while the first time."""
    time.sleep(0.01)
    return 0.5


def configured(user: Any, reward: Any = "exact", reward_options: Any = None, **options: Any) -> Config:
    return parse_config(
        {
            "model": {"path": "m"},
            "data": {"train": "t"},
            "sampler": {"tracker": {"reward_range": [-2.0, 2.0]}},
            "episode": {
                "user": user,
                "user_options": options,
                "reward": reward,
                "reward_options": reward_options or {},
                "max_assistant_turns": 3,
            },
        }
    )


def verdict(config: Config, text: str, answer: Any = "4") -> Verdict:
    """What the user's checker says."""

    async def scene() -> Verdict:
        users = EpisodeParts(config)
        try:
            return await users.user._check(text, answer, {})  # type: ignore[attr-defined]
        finally:
            await users.close()

    return asyncio.run(scene())


def test_no_user() -> None:
    assert EpisodeParts(configured(None)).user is None


@pytest.mark.parametrize(("name", "kind"), [("corrector", Corrector), ("scripted", Scripted)])
def test_users_by_name(name: str, kind: type) -> None:
    users = EpisodeParts(configured(name))
    assert type(users.user) is kind


def test_an_endpoint_needs_its_address() -> None:
    users = EpisodeParts(configured("llm", base_url="http://127.0.0.1:1/v1", model="m", attempts=2))
    assert isinstance(users.user, LlmUser)
    with pytest.raises(UserError, match="missing a required .*argument: 'base_url'; allowed: base_url, model, "):
        EpisodeParts(configured("llm", model="m"))


def test_a_users_own_class_gets_its_options_and_is_closed() -> None:
    async def scene() -> None:
        users = EpisodeParts(configured(f"{HERE}:Own", greeting="hello"))
        own: Any = users.user
        async with conversation(own, "e") as talking:
            assert (await talking.respond([])).text == "hello"
        assert await own.check("4", "4", {}) == Verdict(1.0)
        await users.close()
        assert own.closed

    asyncio.run(scene())


def test_the_checker_is_the_runs_reward_with_its_options() -> None:
    boxed = configured("corrector", reward="boxed")
    assert verdict(boxed, "so \\boxed{4}") == Verdict(1.0)
    assert verdict(boxed, "4") == Verdict(0.0)
    assert verdict(boxed, " ") == Verdict(0.0, "There was no answer.")


@pytest.mark.integration
def test_the_runs_own_scorer_is_shared_and_left_open() -> None:
    async def scene() -> None:
        config = configured("corrector", reward=f"{HERE}:half")
        users = EpisodeParts(config)
        assert (await users.user._check("4", "4", {})).score == 0.5  # type: ignore[union-attr]
        assert (await users.scorer.score(Outcome(text="4"))).value == 0.5
        await users.close()

    asyncio.run(scene())


@pytest.mark.integration
def test_another_checker_may_be_named_even_one_that_takes_a_process() -> None:
    config = configured("corrector", reward={"boxed": 1.0, "exact": 0.5}, checker=f"{HERE}:half")
    assert verdict(config, "4") == Verdict(0.5, "It is 50% right.")


@pytest.mark.parametrize(
    ("user", "options", "problem"),
    [
        ("nobody", {}, "episode.user = 'nobody' is unknown; allowed: corrector, scripted, llm, or module:object"),
        (f"{HERE}:half", {}, "is not a class with start, respond, finish"),
        (f"{HERE}:NoFinish", {}, "is not a class with start, respond, finish"),
        ("corrector", {"turn": 3}, "'turn'; allowed: checker, checker_options, turns, right_from, message, discount"),
        (
            "corrector",
            {"turns": "three"},
            "user_options of 'corrector': turns = 'three': input should be a valid integer",
        ),
        ("corrector", {"turns": 0}, "turns = 0"),
        ("corrector", {"checker": "nothing"}, "'nothing' is unknown"),
        ("corrector", {"checker": 5}, "checker = 5 must be the name of a reward"),
        (f"{HERE}:Own", {}, "'greeting'; allowed: checker, checker_options, greeting, loud"),
    ],
)
def test_what_cannot_be_is_named(user: str, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError) as caught:
        EpisodeParts(configured(user, **options))
    assert problem in str(caught.value)


def test_a_sum_of_rewards_is_no_checker() -> None:
    with pytest.raises(UserError, match="checker must name one reward, where episode.reward = .* is a sum"):
        EpisodeParts(configured("corrector", reward={"boxed": 1.0, "exact": 0.5}))
