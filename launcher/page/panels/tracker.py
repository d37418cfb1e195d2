"""The panel about the value tracker: its values, how well they predict rewards, and the variance they save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from launcher.folder.episodes import EpisodeIndex
from launcher.folder.metrics import Metrics
from launcher.folder.query import prompt_texts
from launcher.folder.statistics import finite
from launcher.folder.tracker import newest_tracker
from launcher.page.charts import NO_BATCH, bars, curve, lines, number, panel, steps, table

REWARD_IN_BIN = "tracker/reward_where_value_is_0."
LISTED = 12  # prompts drawn most, and as many drawn least


def tracker_panel(metrics: Metrics, folder: Path, episodes: EpisodeIndex) -> dict[str, Any]:
    """Charts of values, calibration, variance ratio, and how often prompts were drawn."""
    values, visits = metrics.histogram("tracker/value_percent"), metrics.histogram("tracker/visits")
    ratio, low, high = (finite(metrics.series(f"tracker/variance_ratio{end}")) for end in ("", "_low", "_high"))
    answered = {"drawn at all": "visited", "always solved": "always_solved", "never solved": "never_solved"}
    prompts = steps(metrics, {words: f"tracker/{name}" for words, name in answered.items()})
    saved = [curve("Var(r − v) / Var(r)", ratio, low, high)]
    note = "Variance of reward − value over that of the reward, within batches: below 1 the baseline helps."
    charts = [
        bars("values", "Values of the prompts", values, "share", scale=100.0),
        lines("calibration", "Calibration: mean reward by value", [calibration(metrics)], x="value"),
        lines("variance", "Variance ratio, with two standard errors", saved, note=note),
        bars("visits", "How often prompts were drawn", visits, "times"),
        lines("solved", "Prompts by their answers so far", prompts, "share"),
        drawn_prompts(folder, episodes),
    ]
    return panel("tracker", "Value tracker", charts, _words(metrics), NO_BATCH)


def calibration(metrics: Metrics) -> dict[str, Any]:
    """The newest mean reward in each tenth of the value range, at the middle of the tenth."""
    tenths = [(i, metrics.last(f"{REWARD_IN_BIN}{i}", "sampler")) for i in range(10)]
    known = [(0.05 + i / 10, number(value)) for i, value in tenths if value is not None]
    return {"label": "mean reward", "x": [round(x, 2) for x, _ in known], "y": [y for _, y in known]}


def drawn_prompts(folder: Path, episodes: EpisodeIndex) -> dict[str, Any]:
    """The prompts drawn most and least, from the tracker that was saved with the newest readable checkpoint."""
    missing = "These prompts are read from a checkpoint, and there is none yet (`learner.checkpoint_every`)."
    columns = ("prompt", "drawn", "value")
    saved = newest_tracker(folder)
    if saved is None:
        return table("prompts", "Prompts drawn most and least", columns, [], missing)
    ids, order = saved.prompt_ids, np.argsort(-saved.visits, kind="stable")
    chosen = order if len(order) <= 2 * LISTED else np.concatenate([order[:LISTED], order[-LISTED:]])
    rows = [[ids[i], int(saved.visits[i]), number(float(saved.values[i]))] for i in chosen]
    note = f"as of version {saved.version}, of {len(ids):,} prompts; choose one to see its episodes"
    texts = prompt_texts(episodes, [row[0] for row in rows])
    listed = table("prompts", "Prompts drawn most and least", columns, rows, missing, note)
    return listed | {"texts": [texts.get(row[0]) for row in rows]}  # in place of the ids


def _words(metrics: Metrics) -> str:
    ratio = metrics.last("tracker/variance_ratio", "sampler")
    if ratio is None or not np.isfinite(ratio):
        return ""
    change = 1.0 - ratio
    saved = (
        f"The baseline saves {change:.0%} of the variance of the advantages"
        if change >= 0
        else f"The baseline adds {-change:.0%} of variance to the advantages"
    )
    error = metrics.last("tracker/calibration_error", "sampler")
    return f"{saved}." if error is None else f"{saved}; values and rewards differ by {error:.2f} on average."
