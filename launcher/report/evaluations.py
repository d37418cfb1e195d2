"""The evaluations of a run folder, answer by answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from launcher.episodes.rows import EpisodeRow, read_rows
from launcher.report.statistics import Band, Curve, bootstrap

FOLDER = "validation_data"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A complete evaluation: the answered episodes of each held-out prompt, without the prompt's text.

    What was set aside is left out, as it is of the accuracy that the run itself measures.
    """

    version: int
    prompts: dict[str, list[EpisodeRow]]

    def accuracies(self, full_reward: float) -> dict[str, float]:
        """The share of each prompt's responses with full reward."""
        return {
            prompt_id: float(np.mean([(row.reward or 0.0) >= full_reward for row in rows]))
            for prompt_id, rows in self.prompts.items()
        }

    def rewards(self) -> dict[str, float]:
        """Mean reward of each prompt's responses."""
        return {
            prompt_id: float(np.mean([row.reward or 0.0 for row in rows])) for prompt_id, rows in self.prompts.items()
        }


def read_evaluations(folder: Path) -> list[Evaluation]:
    """All complete evaluations of a run folder, by version; a line that cannot be read is left out."""
    files = {int(path.stem): path for path in (folder / FOLDER).glob("*.jsonl") if path.stem.isdecimal()}
    evaluations = []
    for version, path in sorted(files.items()):
        prompts: dict[str, list[EpisodeRow]] = {}
        for row in read_rows([path]):
            if row is not None and row.reward is not None:
                prompts.setdefault(row.prompt_id, []).append(replace(row, prompt=""))
        if prompts:
            evaluations.append(Evaluation(version, prompts))
    return evaluations


def accuracy_bands(evaluations: list[Evaluation], full_reward: float) -> Iterator[tuple[int, Band]]:
    """Version, and accuracy with its band over prompts, of each evaluation."""
    for evaluation in evaluations:
        yield evaluation.version, bootstrap(np.array(list(evaluation.accuracies(full_reward).values())))


def accuracy(evaluations: list[Evaluation], full_reward: float) -> Curve:
    """Mean accuracy over prompts, by version."""
    values = [float(np.mean(list(evaluation.accuracies(full_reward).values()))) for evaluation in evaluations]
    return Curve(np.array([evaluation.version for evaluation in evaluations], float), np.array(values))


@dataclass(frozen=True, slots=True)
class Improvement:
    """Accuracy of the first and the last evaluation, on the held-out prompts that both have asked.

    Attributes:
        change: of the differences, prompt by prompt.
        better, worse: how many prompts got more, and less, accurate.
    """

    first: int
    last: int
    before: Band
    after: Band
    change: Band
    prompts: int
    better: int
    worse: int


def improvement(evaluations: list[Evaluation], full_reward: float) -> Improvement | None:
    """What training changed; None where there are not two evaluations of the same prompts."""
    if len(evaluations) < 2:
        return None
    first, last = evaluations[0], evaluations[-1]
    before, after = first.accuracies(full_reward), last.accuracies(full_reward)
    both = [prompt_id for prompt_id in before if prompt_id in after]
    if not both:
        return None
    left, right = (np.array([scores[prompt_id] for prompt_id in both]) for scores in (before, after))
    return Improvement(
        first=first.version,
        last=last.version,
        before=bootstrap(left),
        after=bootstrap(right),
        change=bootstrap(right - left),
        prompts=len(both),
        better=int((right > left).sum()),
        worse=int((right < left).sum()),
    )
