"""A look into a run from outside: its state, and what could not be processed."""

from __future__ import annotations

import time

from rich.console import Group, RenderableType
from rich.table import Table

from common.config import Config
from common.streams import dead
from common.streams.broker import Broker, connect
from launcher.display import figures, process_rows
from launcher.progress import Progress


def _broker(config: Config) -> Broker:
    return connect(config.broker.model_copy(update={"wait": 0.0}), config.run.name)


def status(config: Config) -> RenderableType:
    """Figures and processes of a run."""
    progress = Progress(_broker(config), config.run.steps)
    progress.refresh()
    state = "finished" if progress.finished else "going on" if progress.processes else "no process is alive"
    heading = f"run {config.run.name}: step {progress.version}/{progress.steps}, {state}"
    return Group(heading, "", figures(progress), "", process_rows(progress, {}))


def dead_letters(config: Config) -> RenderableType:
    """The newest dead letters, one a row."""
    letters = dead.list_dead(_broker(config))
    if not letters:
        return f"run {config.run.name}: no dead letters"
    table = Table(box=None)
    for column in ("id", "stream", "set aside", "by", "reason"):
        table.add_column(column)
    for entry_id, note in letters:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(note["at"]))
        table.add_row(entry_id, note["stream"], when, note["by"], note["reason"])
    return table


def replay(config: Config, entry_id: str) -> str:
    """Put a dead letter back; returns its stream's name."""
    return dead.replay(_broker(config), entry_id)
