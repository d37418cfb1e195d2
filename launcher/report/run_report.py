"""`spo report`: what a run was, what it has learned and where its time went, as one page."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np

from launcher.episodes.rows import episode_files, read_rows
from launcher.folder.version_table import version_table
from launcher.report.books import MEANINGS, balances
from launcher.report.curves import charts, finite
from launcher.report.drawing import png
from launcher.report.evaluations import accuracy_bands
from launcher.report.page import count, render
from launcher.report.pairs import RULE, Pairs, pairs
from launcher.report.run_data import RunData
from launcher.report.settings import NOT_SET, differing
from launcher.report.time_budget import TimeBudget, accumulated, time_budget
from launcher.run.pace import duration

SHOWN_LETTERS = 50  # reasons of dead letters


@dataclass(frozen=True, slots=True)
class Tile:
    """One figure of the headline."""

    name: str
    value: str
    note: str = ""


def report(run: RunData) -> str:
    """The page of a run."""
    budget, counters = time_budget(run), run.counters
    bands = list(accuracy_bands(run.evaluations, run.full_reward))
    return render(
        "report.html",
        charts(run),
        run=run,
        model=run.values.get("model.path"),
        made=time.strftime("%Y-%m-%d %H:%M"),
        release=version("spo-trainer"),
        improvement=run.improvement(),
        only=bands[-1] if bands else None,
        rewards=_rewards(run),
        tiles=_tiles(run, budget),
        differing=differing(run.values),
        none_given=NOT_SET,
        pairs=_pairs(run),
        rule=RULE,
        time=budget,
        starts=sum(entry.get("process") == "sampler" for entry in run.versions),
        counters=counters,
        meanings=MEANINGS,
        balances=balances(counters, run.is_over),
        letters=(run.queue.letters or _set_aside(run)).most_common(SHOWN_LETTERS) if counters.get("dead") else [],
        dead=counters.get("dead", 0),
        versions=version_table(run.versions),
    )


def write_pictures(run: RunData, folder: Path) -> list[Path]:
    """Every chart of the report as a PNG file."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for chart in charts(run):
        path = folder / f"{chart.name}.png"
        png(chart, path)
        paths.append(path)
    return paths


def _tiles(run: RunData, budget: TimeBudget) -> list[Tile]:
    counters, metrics = run.counters, run.metrics
    steps = run.values.get("run.steps")
    of_all = f"of {steps:,}" if isinstance(steps, int) else ""
    trained = float(np.nansum(metrics.series("tokens/model", "learner").values))
    names = [name for name in metrics.processes() if "generator/tokens" in metrics.names(name)]
    sampled = sum(accumulated(metrics.timeline("generator/tokens", name)) for name in names)
    rewarded = counters.get("rewarded")
    return [
        Tile("steps", f"{run.step:,}", of_all),
        Tile("samples", "–" if rewarded is None else count(rewarded), _evaluated(counters)),
        Tile("tokens trained on", count(trained) if trained else "–", f"{count(sampled)} sampled" if sampled else ""),
        Tile("time", duration(budget.total) if budget.total else "–", ""),
    ]


def _evaluated(counters: dict[str, int]) -> str:
    return f"and {count(counters['evaluated'])} in evaluations" if counters.get("evaluated") else ""


def _rewards(run: RunData) -> tuple[float, float, int] | None:
    """Mean reward of the first and the last batches, and of how many."""
    values = finite(run.metrics.series("reward/mean")).values
    if not len(values):
        return None
    n = max(1, min(10, len(values) // 2))
    return float(values[:n].mean()), float(values[-n:].mean()), n


def _pairs(run: RunData) -> Pairs | None:
    if run.improvement() is None:
        return None
    return pairs(run.evaluations[0], run.evaluations[-1])


def _set_aside(run: RunData) -> Counter[str]:
    """Why tasks were set aside, as the run folder has them."""
    files = [path for path in run.folder.glob("rollouts/*.jsonl") if path in episode_files(run.folder)]
    return Counter(row.reason for row in read_rows(files) if row is not None and "set aside" in row.flags)
