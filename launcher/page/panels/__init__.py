"""The panels that show a run; each module makes some of them."""

from __future__ import annotations

from typing import Any

from launcher.folder.run import Run
from launcher.page.panels.configuration import configuration_panel
from launcher.page.panels.counts import counts_panel
from launcher.page.panels.gpus import gpus_panel
from launcher.page.panels.learning import pairs_panel, reward_panel, summary_panel
from launcher.page.panels.speed import processes_panel, queues_panel, throughput_panel, time_panel
from launcher.page.panels.tracker import tracker_panel
from launcher.page.panels.training import (
    correction_panel,
    endings_panel,
    lengths_panel,
    optimization_panel,
    staleness_panel,
)


def panels(run: Run) -> list[dict[str, Any]]:
    """All panels of a run, in the order of the page."""
    with run.lock:
        metrics, evaluated = run.metrics, run.evaluations()
        return [
            summary_panel(run, evaluated),
            reward_panel(metrics, evaluated),
            pairs_panel(run, evaluated),
            gpus_panel(metrics),
            throughput_panel(metrics),
            time_panel(run),
            staleness_panel(metrics),
            tracker_panel(metrics, run.folder.path, run.episodes),
            correction_panel(metrics),
            optimization_panel(metrics),
            lengths_panel(metrics),
            endings_panel(metrics, run.episodes),
            queues_panel(metrics),
            processes_panel(metrics, run.state == "running"),
            counts_panel(run),
            configuration_panel(run),
        ]
