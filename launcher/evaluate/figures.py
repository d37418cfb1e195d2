"""The figures of an evaluation, from the file of its answers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sampler.evaluation_metrics import Response, summarize_groups


def evaluate(rows: Iterable[dict[str, Any]], missing: int, samples: int, full_reward: float) -> dict[str, float]:
    """Figures of all answers, of each data set where there are several, and of each value of `eval.by_column`.

    Args:
        rows: lines of the file.
        missing: answers that were set aside.
        samples: answers to each prompt.
    """
    responses, groups = [], []
    for row in rows:
        # The same prompt may be in two data sets.
        prompt = f"{row['source']}/{row['prompt_id']}"
        responses.append(Response(prompt, float(row["score"]), str(row["answer"])))
        groups.append([str(name) for name in row["groups"]])
    figures = summarize_groups(responses, groups, samples, full_reward)
    return figures | {"set_aside": float(missing)}
