"""What episodes are played with: made once, shared, and closed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from common.config import parse_config
from generator import parts as module
from generator.parts import EpisodeParts
from tests.support.process_sandbox import ProcessSandbox


def parts(**episode: Any) -> EpisodeParts:
    return EpisodeParts(
        parse_config({"model": {"path": "m"}, "data": {"train": "t"}, "episode": {"max_assistant_turns": 3} | episode})
    )


class Counted(ProcessSandbox):
    made = closed = 0

    def __init__(self, config: Any) -> None:
        super().__init__()
        Counted.made += 1

    async def close(self) -> None:
        Counted.closed += 1


def test_tools_rewards_and_checkers_share_one_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "make_sandbox", Counted)
    checker = {"checker": "code", "checker_options": {"partial": False}}
    made = parts(tools=["code_interpreter"], reward={"code": 1.0, "exact": 0.0}, user="corrector", user_options=checker)
    assert Counted.made == 1
    asyncio.run(made.close())
    assert Counted.closed >= 1
    assert parts(tools=["calculator"])._shared._sandbox is None
    assert Counted.made == 1, "nobody needs one"
