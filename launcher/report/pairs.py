"""The same held-out prompts before and after training, for people to read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from launcher.episodes.rows import EpisodeRow, read_episode
from launcher.episodes.turns import Turn, plain, turns
from launcher.report.evaluations import Evaluation

SHOWN = 5  # prompts of each kind
LONGEST = 4000  # characters of one message
RULE = (
    f"Chosen by rule: of the held-out prompts that both evaluations asked, the {SHOWN} whose mean reward rose most and "
    f"the {SHOWN} whose mean reward fell most; among equals, those whose prompt id comes first. Of several responses "
    "the one is shown whose reward is nearest to their mean, and of those the first."
)


@dataclass(frozen=True, slots=True)
class Shown:
    """One episode of an evaluation: the messages after the prompt, and how it ended."""

    version: int
    mean_reward: float
    responses: int
    reward: float
    reason: str
    tokens: int
    turns: list[Turn]


@dataclass(frozen=True, slots=True)
class Pair:
    """A held-out prompt, with an episode of the first version and one of the last."""

    prompt_id: str
    prompt: list[Turn]
    expected: str
    before: Shown
    after: Shown


@dataclass(frozen=True, slots=True)
class Pairs:
    """Prompts whose rewards rose and fell most, those that changed most first."""

    improved: list[Pair]
    worse: list[Pair]


def pairs(first: Evaluation, last: Evaluation, count: int = SHOWN) -> Pairs:
    """The prompts that `RULE` names."""
    before, after = first.rewards(), last.rewards()
    change = {prompt_id: after[prompt_id] - before[prompt_id] for prompt_id in before if prompt_id in after}
    rose = sorted((prompt_id for prompt_id in change if change[prompt_id] > 0), key=lambda one: (-change[one], one))
    fell = sorted((prompt_id for prompt_id in change if change[prompt_id] < 0), key=lambda one: (change[one], one))
    return Pairs(
        [_pair(prompt_id, first, last) for prompt_id in rose[:count]],
        [_pair(prompt_id, first, last) for prompt_id in fell[:count]],
    )


def _pair(prompt_id: str, first: Evaluation, last: Evaluation) -> Pair:
    chosen = [_typical(evaluation.prompts[prompt_id]) for evaluation in (first, last)]
    records = [read_episode(row) for row in chosen]
    prompt = [_bounded(turn) for turn in turns(records[0]) if turn.about == "prompt"]
    before, after = (
        _shown(evaluation, row, record) for evaluation, row, record in zip((first, last), chosen, records, strict=True)
    )
    return Pair(prompt_id, prompt, plain(records[0].get("gts")), before, after)


def _typical(rows: list[EpisodeRow]) -> EpisodeRow:
    mean = sum(row.reward or 0.0 for row in rows) / len(rows)
    return min(rows, key=lambda row: abs((row.reward or 0.0) - mean))


def _shown(evaluation: Evaluation, row: EpisodeRow, record: dict[str, Any]) -> Shown:
    return Shown(
        version=evaluation.version,
        mean_reward=evaluation.rewards()[row.prompt_id],
        responses=len(evaluation.prompts[row.prompt_id]),
        reward=row.reward or 0.0,
        reason=row.reason,
        tokens=int(record.get("model_tokens") or 0),
        turns=[_bounded(turn) for turn in turns(record) if turn.about != "prompt"],
    )


def _bounded(turn: Turn) -> Turn:
    left_out = len(turn.text) - LONGEST
    text = turn.text if left_out <= 0 else f"{turn.text[:LONGEST]}\n[{left_out:,} more characters]"
    return turn._replace(text=text)
