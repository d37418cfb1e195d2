"""Reward of the training batches, and accuracy of the held-out sets."""

from __future__ import annotations

from typing import Any

from launcher.dashboard.charts import line, lines, panel
from launcher.folder.metrics import Metrics

OWN = {"reward/mean", "reward/std"}
FIGURES = ("avg@", "maj@", "pass@")


def reward_panel(metrics: Metrics) -> dict[str, Any]:
    """Reward by batch, by part and by data set; accuracy by set, and its other figures."""
    names = metrics.names("sampler")
    parts = [name for name in names if name.startswith("reward/") and name not in OWN]
    sources = [name for name in names if name.startswith("source/") and name.endswith("/reward")]
    validation = [name.removeprefix("validation/") for name in names if name.startswith("validation/")]
    sets = [name.removesuffix("/accuracy") for name in validation if name.endswith("/accuracy")]
    figures = [name for name in validation if name.startswith(FIGURES)]
    charts = [
        lines(
            "reward", "Reward of training batches", [line("mean", metrics.series("reward/mean"))],
            "No batch has been closed yet: the first reward comes with the first full batch.",
        ),
        lines(
            "accuracy", "Held-out accuracy",
            [line("all", metrics.series("validation/accuracy")), *(_figure(metrics, one, "accuracy") for one in sets)],
            "Nothing has been evaluated: `data.heldout` names a held-out set, `eval.every` says how often.", "share",
        ),
        lines(
            "figures", "Held-out figures, all sets",
            [line(name, metrics.series(f"validation/{name}")) for name in figures],
            "Only accuracy: `eval.samples` above 1 gives avg@k, maj@k and pass@k.", "share",
        ),
    ]  # fmt: skip
    if len(parts) > 1:
        drawn = [line(name.removeprefix("reward/"), metrics.series(name)) for name in parts]
        charts.append(lines("parts", "Reward by part", drawn, ""))
    if sources:
        drawn = [line(name.split("/")[1], metrics.series(name)) for name in sources]
        charts.append(lines("sources", "Reward by data source", drawn, ""))
    degenerate = metrics.series("group/degenerate")
    if len(degenerate.values):
        charts.append(lines("degenerate", "Degenerate groups", [line("share", degenerate)], "", "share"))
    return panel("reward", "Reward and accuracy", charts, _words(metrics))


def _figure(metrics: Metrics, one: str, figure: str) -> dict[str, Any]:
    return line(one, metrics.series(f"validation/{one}/{figure}"))


def _words(metrics: Metrics) -> str:
    accuracy = metrics.series("validation/accuracy")
    if len(accuracy.values) < 2:
        return ""
    first, last = accuracy.values[0], accuracy.values[-1]
    return (
        f"Held-out accuracy went from {first:.1%} at version {accuracy.versions[0]} to {last:.1%} at version "
        f"{accuracy.versions[-1]}; the best was {accuracy.values.max():.1%}."
    )
