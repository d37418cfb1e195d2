"""Tools, users and rewards of installed packages are used by the names they announce."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from common.config import Config, parse_config
from common.errors import UserError
from generator.parts import EpisodeParts
from generator.rewards import Outcome, Score, Scorer
from generator.tools import Toolbox
from generator.users import conversation
from tests.support.episode import ScriptedEngine, call, play
from tests.support.plugin_package import install


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch)


def configured(**episode: Any) -> Config:
    turns = {"max_assistant_turns": 3}
    return parse_config({"model": {"path": "m"}, "data": {"train": "t"}, "episode": turns | episode})


def test_a_tool_is_called_in_an_episode() -> None:
    engine = ScriptedEngine(call("ruler", '{"word": "seven"}') + "<|im_end|>", "5<|im_end|>")
    episode = play(engine, tools=["ruler"], tool_options={"ruler": {"unit": "signs"}})
    assert [entry.text for entry in episode.transcript.entries if entry.role == "tool"] == ["5 signs"]


def test_a_tool_may_come_with_code_blocks_where_it_is_an_interpreter_by_name() -> None:
    # Only the generator knows what the package's tool is called: the configuration as such is possible.
    assert configured(tools=["ruler"], call_format="code").episode.tools == ["ruler"]


def test_a_user_talks() -> None:
    async def scene() -> str:
        user = EpisodeParts(configured(user="nodding", user_options={"word": "Quite."})).user
        assert user is not None
        async with conversation(user, "e") as talking:
            return (await talking.respond([])).text

    assert asyncio.run(scene()) == "Quite."


@pytest.mark.integration
def test_a_reward_is_scored_in_its_process() -> None:
    async def scene() -> Score:
        scorer = Scorer(configured(reward="brevity", reward_options={"brevity": {"most": 8}}))
        try:
            return await scorer.score(Outcome(text="four"))
        finally:
            await scorer.close()

    assert asyncio.run(scene()) == Score(0.5, {"brevity": 0.5}, 0.5)


def test_their_options_are_checked_like_ours() -> None:
    with pytest.raises(UserError, match="tool_options of 'ruler': .*'size'; allowed: unit"):
        Toolbox(configured(tools=["ruler"], tool_options={"ruler": {"size": 1}}).episode)
    with pytest.raises(UserError, match="user_options of 'nodding': word = 5: input should be a valid string"):
        EpisodeParts(configured(user="nodding", user_options={"word": 5}))
    with pytest.raises(UserError, match="reward_options of 'brevity': most = 'many': input should be a valid integer"):
        Scorer(configured(reward="brevity", reward_options={"brevity": {"most": "many"}}))
