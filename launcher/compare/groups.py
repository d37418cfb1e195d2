"""Which runs are one line of a comparison, and what differs between the lines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from common.errors import UserError, one_line
from launcher.folder.run import Run
from launcher.folder.settings import NAMES, defaults, setting

SEED = "run.seed"
# What is learned; how it is learned may differ.
TASK = ("data.*", "episode.reward", "episode.reward_options", "episode.tools", "episode.tool_options", "episode.user*")
LONGEST = 48  # characters of a label


@dataclass(frozen=True, slots=True)
class RunGroup:
    """Runs that are one line."""

    label: str
    runs: list[Run]


def group_runs(runs: Sequence[Run], by: Sequence[str] = ()) -> list[RunGroup]:
    """The lines of a comparison, in the order in which the runs were given.

    Args:
        by: keys of the configuration whose values must be the same; by default all but the run's seed and names.

    Raises:
        UserError: none of the runs has such a key.
    """
    for key in by:
        if not any(key in run.values for run in runs):
            known = sorted({name for run in runs for name in run.values})
            nearest = get_close_matches(key, known, n=1)
            raise UserError(
                f"--group-by {key}: the runs have no such key" + (f"; did you mean {nearest[0]}?" if nearest else "")
            )
    members: dict[str, list[Run]] = {}
    for run in runs:
        values = {key: run.values.get(key) for key in by} if by else shared(run)
        members.setdefault(json.dumps(values, sort_keys=True, default=str), []).append(run)
    lines = list(members.values())
    keys = list(by) or list(differences([line[0] for line in lines]))
    return [RunGroup(_label(line, keys, len(lines)), line) for line in lines]


def shared(run: Run) -> dict[str, Any]:
    """The settings that runs must have in common to differ in nothing but their seed."""
    values = defaults() | run.values if run.values else {}
    return {key: value for key, value in values.items() if key != SEED and key not in NAMES}


def differences(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Keys in which runs differ, with the value of each; a dash where a run has no such key."""
    values = [shared(run) for run in runs]
    keys = dict.fromkeys(key for of_run in values for key in of_run)
    texts = {key: [setting(of_run[key]) if key in of_run else "–" for of_run in values] for key in keys}
    return {key: values for key, values in texts.items() if len(set(values)) > 1}


def other_tasks(runs: Sequence[Run]) -> list[str]:
    """Keys by which runs learn different things."""
    return [key for key in differences(runs) if any(fnmatchcase(key, pattern) for pattern in TASK)]


def _label(runs: list[Run], keys: list[str], lines: int) -> str:
    """What tells a line from the others: values if they are few and short, else names."""
    values = one_line(", ".join(f"{key.rpartition('.')[2]}={setting(runs[0].values.get(key))}" for key in keys))
    if lines > 1 and values and len(values) <= LONGEST:
        return values
    names = sorted(run.name for run in runs)
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
