"""Finds the agents, and scores an empty response to the first row of each source: what cannot work is named at once."""

from __future__ import annotations

import asyncio

import numpy as np

from common.checks.list import check_run
from common.config import Config, EpisodeConfig
from common.config.data import Source
from common.errors import UserError
from common.log import get_logger
from generator.agents.environment import check_environments
from generator.agents.sandboxed import check_agents
from generator.parts import SIDES, SharedParts
from generator.rewards import Outcome, Scorer
from generator.rewards.pool import RewardFailed, WorkerDied
from launcher.checks.vocabulary import check_vocabularies
from sampler.prompts import Prompt, SourcePrompts, check_rows
from sampler.rows import open_rows

UNTRIED = {"judge", "agent"}  # rewards that call a server, or that only an agent gives


def check_with_rewards(config: Config) -> None:
    """Check a run on this machine, its teachers, agents and rewards, before any start; raises `UserError`."""
    check_run(config)
    check_vocabularies(config)
    check_agents(config)
    asyncio.run(check_environments(config, get_logger()))
    asyncio.run(_score_first_rows(config))


async def _score_first_rows(config: Config) -> None:
    shared = SharedParts(config.sandbox)
    try:
        for side in SIDES:
            for source in config.data.sources(side):
                own = config.for_source(source)
                try:
                    scorer = shared.scorer(own)
                except UserError as error:
                    raise UserError(f"{source.key}: {error}" if source.episode else str(error)) from None
                prompt = _first_prompt(source)
                if prompt is not None:
                    await score_empty(scorer, own.episode, prompt, side)
    finally:
        await shared.close()


async def score_empty(scorer: Scorer, episode: EpisodeConfig, prompt: Prompt, side: str) -> None:
    """Score an empty response; `UNTRIED` rewards are left out.

    Raises:
        UserError: a reward fails, as one does that cannot read the row.
    """
    if not UNTRIED.isdisjoint(reward_names(episode)):
        return
    limit = episode.max_response_tokens
    try:
        await scorer.score(Outcome("", answer=prompt.answer, row=prompt.row, prompt=prompt.prompt, limit=limit))
    except (RewardFailed, WorkerDied, TimeoutError, ValueError) as error:
        where = f"on the first row of data.{side} with an empty response"
        if isinstance(error, RewardFailed):
            raise UserError(str(error).replace(": ", f" fails {where}: ", 1)) from None
        raise UserError(f"{error} ({where})") from None


def reward_names(episode: EpisodeConfig) -> list[str]:
    return list(episode.reward_weights)


def _first_prompt(source: Source) -> Prompt | None:
    """The first usable prompt; None where there is none, which the sampler says."""
    try:
        rows = open_rows(source.path, source.split, source.options, source.config)
    except UserError:
        return None
    usable = next((row for row in check_rows(rows, source) if row.problem is None), None)
    return None if usable is None else SourcePrompts(source, rows, np.array([usable.number]), [usable.prompt_id])[0]
