"""Grades what an agent has left in its container, by Harbor's convention.

The tests are copied to `/tests` only after a restart of the container, which ends all that the agent has started.
`/tests/test.sh` writes a number to `/logs/verifier/reward.txt`, or JSON to `/logs/verifier/reward.json`: a number, or a
mapping with the key `reward`. Its exit code and its output do not count.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.network import excerpt
from generator.agents.containers.container import TaskContainer
from generator.rewards.pool import RewardFailed

SCRIPT = "test.sh"
TESTS, VERIFIER = "/tests", "/logs/verifier"
PREPARE = f"rm -rf {TESTS} {VERIFIER} && mkdir -p {VERIFIER} /logs/agent && chmod 777 {VERIFIER}"
MAX_REWARD = 1 << 16  # bytes of a reward file
MAX_TESTS = 64 << 20  # bytes


class GradingTimedOut(Exception):
    """The tests took longer than `grading_seconds`."""


async def grade(container: TaskContainer, tests: Any) -> float:
    """Run a task's tests, and return the reward that they leave.

    Args:
        tests: the folder with `test.sh`, or its files as text by their paths.

    Raises:
        GradingTimedOut: they took too long.
        RewardFailed: there are no tests, or they leave no reward or two.
        ContainerFailed: the engine or the container failed.
    """
    files = files_of(tests, SCRIPT)
    await container.engine.restart(container.id)
    code, output = await container.execute(["sh", "-c", PREPARE], user="0")
    if code != 0:
        raise RewardFailed(f"reward 'container': the tests' folders cannot be made in the container: {excerpt(output)}")
    placed = {f"{TESTS.removeprefix('/')}/{path}": data for path, data in files.items()}
    await container.engine.put(container.id, placed)
    try:
        async with asyncio.timeout(container.settings.grading_seconds):
            code, output = await container.execute([f"{TESTS}/{SCRIPT}"])
    except TimeoutError:
        raise GradingTimedOut from None
    text, as_json = [
        await container.engine.get(container.id, f"{VERIFIER}/{name}", MAX_REWARD)
        for name in ("reward.txt", "reward.json")
    ]
    return reward_of(text, as_json, f"exit code {code}, {excerpt(output[-400:])}")


def reward_of(text: bytes | None, as_json: bytes | None, ended: str) -> float:
    """The reward in what the tests have left, None for a missing file.

    Args:
        ended: how they ended, for messages.

    Raises:
        RewardFailed: it is no finite number, there is none, or the files disagree.
    """
    rewards = [_number(text.strip(), "reward.txt")] if text is not None else []
    rewards += [_number(as_json, "reward.json")] if as_json is not None else []
    if not rewards:
        raise RewardFailed(f"reward 'container': {SCRIPT} left no reward in {VERIFIER} ({ended})")
    if len(set(rewards)) > 1:
        raise RewardFailed(
            f"reward 'container': {SCRIPT} left two rewards, {rewards[0]:g} in reward.txt and {rewards[1]:g} in "
            "reward.json"
        )
    return rewards[0]


def _number(content: bytes, name: str) -> float:
    try:
        value = json.loads(content) if name.endswith("json") else float(content)
        value = value["reward"] if isinstance(value, dict) else value
        if isinstance(value, bool) or not math.isfinite(value):
            raise ValueError
        return float(value)
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
        raise RewardFailed(
            f"reward 'container': {name} holds {excerpt(content)!r}, which is no finite number"
            + (" and no mapping with one as `reward`" if name.endswith("json") else "")
        ) from None


def files_of(place: Any, script: str) -> dict[str, bytes]:
    """The files of a folder, or of a mapping {path: text}, by their paths; raises `RewardFailed`."""
    if isinstance(place, Mapping):
        files = {str(path): str(text).encode() for path, text in place.items()}
    else:
        folder = Path(str(place))
        try:
            paths = [path for path in sorted(folder.rglob("*")) if path.is_file()] if folder.is_dir() else []
            if sum(path.stat().st_size for path in paths) > MAX_TESTS:
                raise RewardFailed(f"reward 'container': {folder} has more than {MAX_TESTS >> 20} MiB")
            files = {str(path.relative_to(folder)): path.read_bytes() for path in paths}
        except OSError as error:  # no access, or a text that is too long for a path
            raise RewardFailed(
                f"reward 'container': {excerpt(str(place))} cannot be read: {error.strerror or error}"
            ) from None
    if script not in files:
        raise RewardFailed(f"reward 'container': there is no {script} in {excerpt(str(place))}")
    return files
