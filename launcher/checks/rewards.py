"""Imports agents and the user's own functions before a run, and tries the rewards on the first rows of each source."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np

from common.checks.check import Finding, Level, refuse_problems
from common.checks.list import check_run
from common.config import Config, EpisodeConfig
from common.config.data import Source
from common.errors import UserError
from common.log import get_logger
from common.messages import Task
from common.process import run_coroutine
from generator.agents.containers.container import check_containers
from generator.agents.environment import check_environments
from generator.agents.sandboxed import check_agents
from generator.episode.parts import SharedParts
from generator.rewards import Outcome, Scorer
from generator.rewards.pool import RewardFailed
from launcher.checks.containers import check_images
from launcher.checks.references import FAILURES, START_ROWS, can_be_tried, compares_only, not_tried, try_references
from launcher.checks.vocabulary import check_vocabularies
from sampler.advantages import load_advantage
from sampler.prompts.prompt_set import Prompt, SourcePrompts, check_rows
from sampler.prompts.rows import open_source
from sampler.values.kinds import load_kind
from sampler.values.selection import load_criterion


def check_with_rewards(config: Config) -> None:
    """Check a run on this machine, its teachers, agents and rewards, before any start; raises `UserError`."""
    check_run(config)
    check_vocabularies(config)
    check_agents(config)
    check_parts(config)
    run_coroutine(check_environments(config, get_logger()))
    run_coroutine(check_containers(config, get_logger()))
    run_coroutine(check_images(config))
    findings = run_coroutine(try_sources(config, START_ROWS))
    refuse_problems(findings)
    for finding in findings:
        (get_logger().info if finding.level is Level.OK else get_logger().warning)(finding.line)


def check_parts(config: Config) -> None:
    """Try the user's own functions of the sampler on made-up data; raises `UserError`."""
    load_advantage(config.algorithm, config.sampler.advantage)
    load_kind(config.sampler.tracker)
    load_criterion(config.sampler.selection)


async def try_sources(
    config: Config, rows: int, all_if_quick: bool = False, track: Any = lambda rows, *_: rows
) -> list[Finding]:
    """Findings about the rewards of each source, tried on its references.

    Args:
        rows: the number of rows of each source, from its beginning.
        all_if_quick: try all rows of a source whose reward only compares answers.
        track: shows progress over rows: `track(rows, how many, what)`.

    Raises:
        UserError: a reward cannot be made.
    """
    shared = SharedParts(config.sandbox)
    findings: list[Finding] = []
    try:
        for source in config.data.all_sources():
            own = config.for_source(source)
            try:
                scorer = shared.scorer(own)
            except UserError as error:
                raise UserError(f"{source.key}: {error}" if source.episode else str(error)) from None
            if note := not_tried(own.episode, source.key):
                findings.append(note)
            if can_be_tried(own.episode):
                limit = None if all_if_quick and compares_only(own.episode) else rows
                trial = await try_references(scorer, own, _named_prompts(source, limit, track))
                findings += trial.findings(source.key)
    finally:
        await shared.close()
    return findings


async def score_empty(scorer: Scorer, episode: EpisodeConfig, task: Task) -> None:
    """Score an empty response unless an `UNTRIED` reward has a part in it; raises `UserError` if a reward fails."""
    if not can_be_tried(episode):
        return
    limit = episode.max_response_tokens
    try:
        await scorer.score(Outcome("", answer=task.answer, row=task.row, prompt=task.prompt, limit=limit))
    except FAILURES as error:
        side = "heldout" if task.kind == "eval" else "train"
        where = f"on the first row of data.{side} with an empty response"
        if isinstance(error, RewardFailed):
            raise UserError(str(error).replace(": ", f" fails {where}: ", 1)) from None
        raise UserError(f"{error} ({where})") from None


def _named_prompts(source: Source, limit: int | None, track: Any) -> Iterator[tuple[str, Prompt]]:
    """The first usable prompts with the names of their rows; empty if no prompt is usable (the sampler reports it)."""
    try:
        rows = open_source(source)
    except UserError:
        return
    usable = (row for row in check_rows(rows, source) if row.problem is None)
    for row in track(islice(usable, limit), len(rows) if limit is None else min(limit, len(rows)), "reward"):
        prompts = SourcePrompts(source, rows, np.array([row.number]), [row.prompt_id])
        yield prompts.where(0), prompts[0]
