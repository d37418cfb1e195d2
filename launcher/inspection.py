"""A look into a run from outside: its state, and what could not be processed."""

from __future__ import annotations

import math
import time
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from common.config import Config
from common.errors import one_line
from common.messages import InvalidMessage, Task
from common.streams import dead
from common.streams.presence import gone_line, learner_gone
from launcher.evaluation_table import evaluation_table
from launcher.folder.episodes import prompt_text
from launcher.run.display import figures, process_rows
from launcher.run.progress import Progress
from launcher.run.reopened import reopened

PROMPT_CHARS = 60


def status(config: Config) -> RenderableType:
    """Figures and processes of a run."""
    progress, gone = _progress(config)
    state = "finished" if progress.finished else "going on" if progress.processes else "no process is alive"
    heading = f"run {config.run.name}: step {progress.version}/{progress.steps}, {state}"
    if gone is not None and progress.processes:
        heading += f"; {gone_line(gone)}"
    newest = progress.evaluations[-1] if progress.evaluations else {}
    evaluated: list[RenderableType] = []
    if "figures" in newest:
        evaluated = [evaluation_table(newest["figures"], f"evaluation of version {newest['version']}"), ""]
    return Group(heading, "", figures(progress), "", *evaluated, process_rows(progress, {}))


def facts(config: Config) -> dict[str, Any]:
    """The same for programs: step, counters, evaluations, processes and the newest step's metrics, ready for JSON."""
    progress, gone = _progress(config)
    return {
        "run": config.run.name,
        "finished": progress.finished,
        "step": progress.version,
        "steps": progress.steps,
        "counters": progress.counters,
        "evaluations": _without_nan(progress.evaluations),
        "unreadable_evaluations": progress.unreadable_evaluations,
        "processes": progress.processes,
        "learner_gone_seconds": gone,
        "redis_memory": progress.memory._asdict(),
        "variance_ratio": progress.variance_ratio,
        "metrics": _without_nan(progress.step.metrics) if progress.step else {},
    }


def _without_nan(value: Any) -> Any:
    """The same with null for figures that nothing was measured of, since JSON has no NaN."""
    if isinstance(value, dict):
        return {name: _without_nan(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _progress(config: Config) -> tuple[Progress, float | None]:
    """The run, and for how many seconds it lacks its learner; None where it has one, or needs none."""
    with reopened(config) as broker:
        progress = Progress(broker, config.run.steps, config.sampler.tracker.reward_range)
        progress.refresh()
        return progress, None if progress.finished else learner_gone(broker)


def dead_letters(config: Config) -> RenderableType:
    """The newest dead letters, one a row; of tasks, what was asked."""
    with reopened(config) as broker:
        letters = dead.list_dead(broker)
    if not letters:
        return f"run {config.run.name}: no dead letters"
    table = Table(box=None)
    for column in ("id", "stream", "kept since", "by", "prompt", "reason"):
        table.add_column(column)
    for entry_id, note in letters:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(note["at"]))
        # Prompts and reasons may quote anything, also what a terminal or a table would take for its own.
        cells = (entry_id, note["stream"], when, note["by"], _prompt(note)[:PROMPT_CHARS], note["reason"])
        table.add_row(*(Text(one_line(cell)) for cell in cells))
    return table


def _prompt(note: dict[str, Any]) -> str:
    """The prompt of a task; empty for anything else and for what cannot be read."""
    try:
        return prompt_text(Task.unpack(note["fields"].get(b"task", b"")).prompt)
    except InvalidMessage:
        return ""


def replay(config: Config, entry_id: str) -> str:
    """Put a dead letter back; returns its stream's name."""
    with reopened(config) as broker:
        return dead.replay(broker, entry_id)
