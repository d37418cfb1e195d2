"""What episodes were like: lengths and cut-offs, endings, tool calls, and tasks set aside."""

from __future__ import annotations

from typing import Any

import numpy as np

from launcher.dashboard.charts import line, lines, panel, table
from launcher.folder.episodes import EVAL, SET_ASIDE, EpisodeIndex
from launcher.folder.metrics import Metrics
from launcher.folder.series import EMPTY, Series

NO_BATCH = "No batch has been closed yet."
CUT_OFF = ("length", "max_seconds")
MOST_REASONS = 30
ENDINGS = 6  # lines of a chart


def lengths_panel(metrics: Metrics, index: EpisodeIndex) -> dict[str, Any]:
    """Tokens of responses, and the share that a limit has cut off."""
    mean = metrics.series("response_length/mean")
    charts = [
        lines(
            "lengths", "Response length",
            [
                # Releases before metrics.jsonl wrote this name.
                line("mean", mean if len(mean.values) else metrics.series("tokens/model_mean")),
                line("longest", metrics.series("response_length/max")),
                line("mean with prompt", metrics.series("tokens/mean")),
            ],
            NO_BATCH, "tokens",
        ),
        lines(
            "cut-off", "Cut off by a limit",
            [line("share of episodes", _either(metrics.series("response_length/clip_ratio"), index, CUT_OFF))],
            "Not known yet: neither a batch nor an episode is there.", "share",
        ),
        lines(
            "turns", "Turns and tool calls an episode",
            [line("turns", metrics.series("num_turns/mean")), line("tool calls", metrics.series("tool_calls/mean"))],
            "This run does not measure them: releases since `metrics.jsonl` do.",
        ),
        lines(
            "seconds", "Seconds an episode",
            [
                line("mean", metrics.series("episode/seconds_mean")),
                line("longest", metrics.series("episode/seconds_max")),
            ],
            "This run does not measure them: releases since `metrics.jsonl` do.", "s",
        ),
    ]  # fmt: skip
    return panel("lengths", "Lengths and cut-offs", charts)


def endings_panel(metrics: Metrics, index: EpisodeIndex) -> dict[str, Any]:
    """Why episodes ended; failing tool calls; tasks that were set aside, with their reasons."""
    names = [name for name in metrics.names("sampler") if name.startswith("ending/")]
    drawn = [line(name.removeprefix("ending/"), metrics.series(name)) for name in names]
    if not drawn:
        drawn = [line(reason, share_by_step(index, (reason,))) for reason in _reasons(index)]
    rows = index.rows()
    aside = rows[rows["flags"] & SET_ASIDE != 0]
    counts = np.bincount(aside["reason"], minlength=1) if len(aside) else np.zeros(1, int)
    order = np.argsort(-counts, kind="stable")[:MOST_REASONS]
    reasons = [[index.reasons.all[i], int(counts[i])] for i in order if counts[i]]
    kinds = [name for name in metrics.names("sampler") if name.startswith("samples/set_aside")]
    charts = [
        lines(
            "endings", "How episodes ended", [one for one in drawn if any(one["y"])],
            "Not known yet: neither a batch nor an episode is there.", "share",
        ),
        lines(
            "tool-errors", "Tool calls that failed", [line("share of calls", metrics.series("tool_calls/error_ratio"))],
            "No tool has been called, or this run does not measure it (`episode.tools` names tools).", "share",
        ),
        lines(
            "set-aside", "Tasks set aside, in all",
            [line(name.removeprefix("samples/"), metrics.series(name)) for name in kinds],
            "None: every task has been answered.",
        ),
        table("reasons", "Reasons for which tasks were set aside", ("reason", "tasks"), reasons,
              "None is among the episodes that are kept (`episode.rollouts_every` above 0 keeps them)."),
    ]  # fmt: skip
    return panel("endings", "Endings, tool errors and tasks set aside", charts)


def share_by_step(index: EpisodeIndex, reasons: tuple[str, ...]) -> Series:
    """The share of the training episodes kept of each version that ended for one of these reasons."""
    rows = index.rows()
    rows = rows[rows["flags"] & (EVAL | SET_ASIDE) == 0]
    if len(rows) == 0:
        return EMPTY
    wanted = [number for number, word in enumerate(index.reasons.all) if word in reasons]
    steps, places = np.unique(rows["step"], return_inverse=True)
    hits = np.bincount(places, np.isin(rows["reason"], wanted), len(steps))
    return Series(steps.astype(np.int64), np.zeros(len(steps)), hits / np.bincount(places, minlength=len(steps)))


def _either(series: Series, index: EpisodeIndex, reasons: tuple[str, ...]) -> Series:
    return series if len(series.values) else share_by_step(index, reasons)


def _reasons(index: EpisodeIndex) -> list[str]:
    """The most frequent endings of the training episodes that are kept."""
    rows = index.rows()
    rows = rows[rows["flags"] & (EVAL | SET_ASIDE) == 0]
    counts = np.bincount(rows["reason"], minlength=1)
    return [index.reasons.all[i] for i in np.argsort(-counts, kind="stable")[:ENDINGS] if counts[i]]
