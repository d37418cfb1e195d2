"""Demonstrations of a quickstart's task, played as episodes by the rules of its own configuration."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from common import messages
from common.config import Config, load_config
from generator.episode.episode import Episode
from generator.episode.parts import EpisodeParts
from generator.episode.runner import EpisodeRunner
from generator.rewards import Outcome
from launcher.quickstart.tiny_model import build_tokenizer
from launcher.tasks.special_tokens import TURN_END
from launcher.tasks.task import Problem, QuickstartTask, Turn
from tests.support.episode import ScriptedEngine

Conversation = tuple[Problem, list[Turn]]


def config_of(task: QuickstartTask) -> Config:
    return load_config(task.template, [])


def play_all(task: QuickstartTask, conversations: Iterable[Conversation]) -> list[tuple[Episode, float]]:
    """Each conversation as an episode in which the model says just that, and its reward."""
    return asyncio.run(_play_all(task, list(conversations)))


async def _play_all(task: QuickstartTask, conversations: list[Conversation]) -> list[tuple[Episode, float]]:
    config, tokenizer = config_of(task), build_tokenizer(task.extra_tokens)
    parts = EpisodeParts(config)
    try:
        played = []
        for number, (problem, turns) in enumerate(conversations):
            engine = ScriptedEngine(*(sampled_text(task, turn) for turn in turns), tokenizer=tokenizer)
            runner = EpisodeRunner(config, engine, parts)  # type: ignore[arg-type]
            row = problem.columns
            episode = await runner.run(
                messages.Task(
                    task_id=f"t{number}", prompt_id="p", prompt=problem.prompt, answer=problem.answer, row=row
                )
            )
            assert engine.turns == [], f"the episode ended early: {episode.reason}"
            turn_rewards = episode.transcript.turn_rewards()
            outcome = Outcome(episode.answer, answer=problem.answer, row=row, turn_rewards=turn_rewards)
            played.append((episode, (await parts.scorer.score(outcome)).value))
        return played
    finally:
        await parts.close()


def sampled_text(task: QuickstartTask, turn: Turn) -> str:
    """A turn as the model would sample it, with the token that ends it, if one does."""
    within = task.call_format == "code" and turn.replied_by == "tool" and turn.reply is not None
    return turn.content if within else turn.content + TURN_END
