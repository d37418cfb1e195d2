"""`spo values merge`: scored responses of all subsets as one JSON file, `{prompt: [scores]}`."""

from __future__ import annotations

import glob
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.answers import in_range
from common.errors import UserError
from sampler.scores import Accept, collect_scores

READERS = 8

Scores = dict[str, list[float]]


@dataclass(frozen=True)
class ScoreRange:
    """Scores that are allowed, and what becomes of the others.

    Attributes:
        low, high: as `sampler.tracker.reward_range`.
        threshold: every score above it becomes `high`, every other `low`; None: scores stay as they are, and those
            outside the range are refused.
    """

    low: float
    high: float
    threshold: float | None = None

    def __call__(self, score: float, where: str) -> float:
        """The score to keep; raises `UserError` where it is refused."""
        if self.threshold is not None:
            return self.high if score > self.threshold else self.low
        try:
            return in_range(score, self.low, self.high)
        except ValueError:
            raise UserError(
                f"{where}: the score {score:g} is outside the reward range [{self.low:g}, {self.high:g}]; give "
                "--reward-range, or --binarize"
            ) from None


def at_most(scores: Scores, n: int, seed: int) -> Scores:
    """At most n scores of each prompt, drawn at random, in the order in which they were read."""
    rng = np.random.default_rng(seed)
    return {
        key: own if len(own) <= n else [own[i] for i in sorted(rng.choice(len(own), n, replace=False))]
        for key, own in scores.items()
    }


def find_files(patterns: Iterable[str]) -> list[Path]:
    """Files that any of the patterns matches, by name; raises `UserError` for a pattern that matches none."""
    paths: set[Path] = set()
    for pattern in patterns:
        matches = {Path(name) for name in glob.glob(pattern, recursive=True)}
        files = {path for path in matches if path.is_file()}
        if not files:
            raise UserError(
                f"{pattern!r} matches no file; quote the pattern, and see that `spo values estimate` is done"
            )
        paths |= files
    return sorted(paths)


def read_all(paths: Sequence[Path], accept: Accept) -> tuple[Scores, list[str]]:
    """All scores by prompt, and the rows that could not be used; the order of reading changes nothing.

    Raises:
        UserError: a file cannot be read, or `accept` refuses a score.
    """
    scores: defaultdict[str, list[float]] = defaultdict(list)
    problems: list[str] = []
    with ThreadPoolExecutor(READERS) as pool:
        for of_file, problems_of_file in pool.map(lambda path: collect_scores(path, accept), paths):
            for key, more in of_file.items():
                scores[key] += more
            problems += problems_of_file
    return dict(scores), problems


def write_scores(scores: Scores, path: Path) -> None:
    """Write the file whole or not at all; raises `UserError` where it cannot be written."""
    unfinished = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(
            json.dumps(scores, ensure_ascii=False) + "\n", encoding="utf-8", errors="backslashreplace"
        )
        os.replace(unfinished, path)
    except OSError as error:
        raise UserError(f"--output {path} cannot be written: {error.strerror}") from None
