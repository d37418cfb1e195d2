"""Builds the images of tasks before a run, and plays some tasks: a solution must pass, and doing nothing must not."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from common.checks.check import Finding, ok, problem, warning
from common.config import Config, Source
from common.errors import UserError
from common.files import own_folder
from generator.agents.containers.container import Containers, TaskContainer
from generator.agents.containers.engine import ContainerFailed
from generator.agents.containers.grading import GradingTimedOut, files_of, grade
from generator.rewards.pool import RewardFailed
from sampler.prompts.harbor import DOCKERFILE, SOLUTION, HarborTasks
from sampler.prompts.prompt_set import check_rows, read_answer
from sampler.prompts.rows import open_source

SAMPLE = 3  # tasks of each source that are played
START_ROWS = 16  # rows of each source whose images must exist when a run starts
BUILD_SECONDS = 3600.0
PLACE = "solution"  # folder of the solution's files in the container
FAILURES = (ContainerFailed, RewardFailed)


async def check_images(config: Config) -> None:
    """Raise `UserError` if the image of one of the first tasks is not there."""
    for source, own in _sources(config):
        containers = Containers(own, None)
        try:
            for number, row in islice(_usable(source), START_ROWS):
                image = containers.image_of(row)
                if not await containers.engine.has_image(image):
                    where = open_source(source).where(number)
                    raise UserError(
                        f"{source.key}: there is no image {image!r} for the task of {where}; build it, or let "
                        "`spo data check` build Harbor's"
                    )
        except ContainerFailed as error:
            raise UserError(f"{source.key}: {error}") from None
        finally:
            await containers.close()


async def try_tasks(config: Config, track: Any = lambda rows, *_: rows) -> list[Finding]:
    """Findings about the tasks of each source whose agent runs in containers; builds the images that are not there.

    Args:
        track: shows progress over rows: `track(rows, how many, what)`.
    """
    return [one for source, own in _sources(config) async for one in _try_source(source, own, track)]


async def _try_source(source: Source, own: Config, track: Any) -> AsyncIterator[Finding]:
    sockets = own_folder() / "endpoint"
    sockets.mkdir(exist_ok=True)
    containers = Containers(own, sockets)
    try:
        rows = list(_usable(source))
        built, lacking, missing = await _build(source, containers, track(rows, len(rows), "images"))
        for line in missing:
            yield problem(f"{source.key}: {line}")
        yield ok(f"{source.key}: {built} images built, {len(rows) - lacking} of {len(rows)} tasks have theirs")
        if not missing and "container" in own.episode.reward_weights:
            step = max(1, len(rows) // SAMPLE)
            for number, row in rows[::step][:SAMPLE]:
                yield await _played(source, own, containers, number, row)
    except ContainerFailed as error:
        yield problem(f"{source.key}: {error}")
    finally:
        await containers.close()


async def _build(source: Source, containers: Containers, rows: Any) -> tuple[int, int, list[str]]:
    """Build the missing images.

    Returns:
        How many were built, how many tasks lack theirs, and a line for each image that is not there.
    """
    opened, built, lacking = open_source(source), 0, 0
    missing: dict[str, str] = {}
    for number, row in rows:
        image = containers.image_of(row)
        if image not in missing and not await containers.engine.has_image(image):
            where = opened.where(number)
            folder = opened.folders[number] if isinstance(opened, HarborTasks) else None
            try:
                if folder is None or not (folder / DOCKERFILE).is_file():
                    raise ContainerFailed(f"there is no image {image!r}; build or pull it")
                context = files_of(folder / "environment", "Dockerfile")
                await containers.engine.build(image, context, os.environ.get("SPO_BUILD_NETWORK"), BUILD_SECONDS)
                built += 1
            except FAILURES as error:
                missing[image] = f"{where}: {error}"
        lacking += image in missing
    return built, lacking, list(missing.values())


async def _played(source: Source, own: Config, containers: Containers, number: int, row: dict[str, Any]) -> Finding:
    """Whether a task's tests give the highest reward to its solution, and less to an agent that does nothing."""
    opened, highest = open_source(source), own.sampler.tracker.reward_range[1]
    where, tests = f"{source.key}: {opened.where(number)}", read_answer(row, source)
    try:
        async with containers.started(row) as idle:
            nothing = await _reward(idle, tests)
        if nothing >= highest:
            return problem(f"{where}: an agent that does nothing gets {nothing:g}; its tests must fail at first")
        solution = opened.folders[number] / SOLUTION if isinstance(opened, HarborTasks) else None
        if solution is None or not solution.is_file():
            return warning(f"{where}: it has no solution to try; an agent that does nothing gets {nothing:g}")
        async with containers.started(row) as solved:
            output = await _solve(solved, solution)
            reward = await _reward(solved, tests)
    except FAILURES as error:
        return problem(f"{where}: {error}")
    if reward < highest:
        return problem(f"{where}: its solution gets {reward:g} instead of {highest:g} (it ended with {output})")
    return ok(f"{where}: its solution gets {reward:g}, doing nothing {nothing:g}")


async def _solve(container: TaskContainer, solution: Path) -> str:
    """Run a solution; returns how it ended."""
    files = files_of(solution.parent, solution.name)
    await container.engine.put(container.id, {f"{PLACE}/{path}": content for path, content in files.items()})
    try:
        async with asyncio.timeout(container.settings.agent_seconds):
            code, output = await container.execute([f"/{PLACE}/{solution.name}"])
    except TimeoutError:
        return f"no exit code within {container.settings.agent_seconds:g} s"
    return f"exit code {code}, {' '.join(output.split())[-200:] or 'and printed nothing'}"


async def _reward(container: TaskContainer, tests: Any) -> float:
    try:
        return await grade(container, tests)
    except GradingTimedOut:
        raise RewardFailed(f"its tests take longer than {container.settings.grading_seconds:g} s") from None


def _sources(config: Config) -> Iterator[tuple[Source, Config]]:
    """The sources whose agents run in containers, each with its configuration."""
    for source in config.data.all_sources():
        own = config.for_source(source)
        if own.episode.agent is not None and own.episode.agent.image is not None:
            yield source, own


def _usable(source: Source) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number and columns of each row that can be used; none if the data cannot be opened, which other checks report."""
    try:
        rows = open_source(source)
    except UserError:
        return
    for row in check_rows(rows, source):
        if row.problem is None and row.row is not None:
            yield row.number, row.row
