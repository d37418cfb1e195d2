"""What episodes were like: lengths and cut-offs, endings, tool calls, and tasks that failed on every attempt."""

from __future__ import annotations

from typing import Any

import numpy as np

from launcher.folder.episodes import SET_ASIDE, EpisodeIndex
from launcher.folder.metrics import Metrics
from launcher.page.charts import lines, panel, steps, table

NO_BATCH = "No batch has been closed yet."
MOST_REASONS = 50


def lengths_panel(metrics: Metrics) -> dict[str, Any]:
    """Tokens of responses, and the share that a limit has cut off."""

    def of(labels: dict[str, str]) -> list[dict[str, Any]]:
        return steps(metrics, labels, "sampler")

    lengths = {"mean": "response_length/mean", "longest": "response_length/max", "mean with prompt": "tokens/mean"}
    charts = [
        lines("lengths", "Response length", of(lengths), NO_BATCH, "tokens"),
        lines("cut-off", "Cut off by a limit", of({"of episodes": "response_length/clip_ratio"}), NO_BATCH, "share"),
        lines(
            "turns", "Turns and tool calls an episode",
            of({"turns": "num_turns/mean", "tool calls": "tool_calls/mean"}), NO_BATCH,
        ),
        lines(
            "seconds", "Seconds an episode", of({"mean": "episode/seconds_mean", "longest": "episode/seconds_max"}),
            NO_BATCH, "s",
        ),
    ]  # fmt: skip
    return panel("lengths", "Lengths and cut-offs", charts)


def endings_panel(metrics: Metrics, index: EpisodeIndex) -> dict[str, Any]:
    """Why episodes ended; failing tool calls; skipped tasks with their reasons."""
    names = metrics.names("sampler")
    endings = {name.removeprefix("ending/"): name for name in names if name.startswith("ending/")}
    kinds = {name.removeprefix("samples/"): name for name in names if name.startswith("samples/set_aside")}
    rows = index.rows()
    counts = np.bincount(rows["reason"][rows["flags"] & SET_ASIDE != 0], minlength=1)
    order = np.argsort(-counts, kind="stable")[:MOST_REASONS]
    reasons = [[index.reasons.all[i], int(counts[i])] for i in order if counts[i]]
    charts = [
        lines("endings", "How episodes ended", steps(metrics, endings), NO_BATCH, "share"),
        lines(
            "tool-errors", "Tool calls that failed", steps(metrics, {"share of calls": "tool_calls/error_ratio"}),
            "No tool has been called (`episode.tools` names tools).", "share",
        ),
        lines("set-aside", "Skipped tasks, in all", steps(metrics, kinds), "None: every task has been answered."),
        table("reasons", "Reasons for which tasks were skipped", ("reason", "tasks"), reasons,
              "None is among the episodes that are kept (`episode.rollouts_every` above 0 keeps them)."),
    ]  # fmt: skip
    return panel("endings", "Endings, tool errors and skipped tasks", charts)
