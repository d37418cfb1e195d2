"""The figures of an evaluation, from the file of its answers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.table import Table
from rich.text import Text

from common.text import one_line
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


def table(figures: dict[str, float], model: str) -> Table:
    """One row for each data set, one column for each figure."""
    shown = [name for name in figures if "/" not in name and name != "set_aside"]
    sets = list(dict.fromkeys(name.rpartition("/")[0] for name in figures if "/" in name))
    made = Table(title=model)
    made.add_column("data", style="bold")
    for name in shown:
        made.add_column(name, justify="right")
    for data in [*sets, ""]:
        values = [figures[f"{data}/{name}" if data else name] for name in shown]
        made.add_row(
            Text(one_line(data) or "all"), *(_cell(name, value) for name, value in zip(shown, values, strict=True))
        )
    return made


def _cell(name: str, value: float) -> str:
    if value != value:
        return "–"
    if name == "samples":
        return f"{value:,.0f}"
    return f"{value:.3f}" if name == "reward" else f"{value:.1%}"
