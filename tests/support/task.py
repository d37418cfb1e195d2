"""Demonstrations of a quickstart's task, played as episodes by the rules of its own configuration."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from common.config import Config, load_config
from common.messages import Task
from generator.episode import Episode
from generator.episode_parts import EpisodeParts
from generator.episode_runner import make_runner
from generator.rewards import Outcome
from launcher.marks import TURN_END
from launcher.tasks.room import Problem, Room, Turn
from launcher.tiny_model import build_tokenizer
from tests.support.episode import ScriptedEngine

Conversation = tuple[Problem, list[Turn]]


def config_of(room: Room) -> Config:
    """As it is published."""
    return load_config(room.template, [])


def play_all(room: Room, conversations: Iterable[Conversation]) -> list[tuple[Episode, float]]:
    """Each conversation as an episode in which the model says just that, and its reward."""
    return asyncio.run(_play_all(room, list(conversations)))


async def _play_all(room: Room, conversations: list[Conversation]) -> list[tuple[Episode, float]]:
    config, tokenizer = config_of(room), build_tokenizer(room.pieces)
    parts = EpisodeParts(config)
    try:
        played = []
        for number, (problem, turns) in enumerate(conversations):
            engine = ScriptedEngine(*(said(room, turn) for turn in turns), tokenizer=tokenizer)
            runner = make_runner(config, engine, tokenizer, parts)  # type: ignore[arg-type]
            row = problem.columns
            episode = await runner.play(
                Task(task_id=f"t{number}", prompt_id="p", prompt=problem.prompt, answer=problem.answer, row=row)
            )
            assert engine.turns == [], f"the episode ended early: {episode.reason}"
            outcome = Outcome(episode.answer, answer=problem.answer, turn_rewards=episode.transcript.turn_rewards())
            played.append((episode, (await parts.scorer.score(outcome)).value))
        return played
    finally:
        await parts.close()


def said(room: Room, turn: Turn) -> str:
    """A turn as the model would sample it, with the token that ends it, if one does."""
    within = room.call_format == "code" and turn.by == "tool" and turn.then is not None
    return turn.said if within else turn.said + TURN_END
