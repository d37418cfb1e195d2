"""The commands `spo status` and `spo dead`: a run's state, and the messages that could not be processed."""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from common.config import Config
from common.errors import one_line
from common.messages import InvalidMessage, Task
from common.scripts import OverrideOption
from common.streams import dead as letters
from common.streams.presence import gone_line, learner_gone
from launcher.folder.episodes import prompt_text
from launcher.options import RunArgument, RunConfigOption, run_config
from launcher.run.display import figures, process_rows
from launcher.run.progress import Progress
from launcher.run.reopened import reopened
from launcher.run.summary import evaluation_table

PROMPT_CHARS = 60


def status(
    run: RunArgument = None,
    config: RunConfigOption = None,
    override: OverrideOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON, for programs.")] = False,
) -> None:
    """Show the state of a live or finished run: its processes, its step, its held-out accuracy.

    - `spo status runs/quickstart-1`
    - `spo status -c my.yaml -o broker.url=redis://10.0.0.5:6379/0`
    - `spo status -c my.yaml --json | jq .counters`
    """
    settings = run_config(run, config, override or ())
    if as_json:
        typer.echo(json.dumps(facts(settings)))
    else:
        Console().print(show(settings))


def dead(
    run: RunArgument = None,
    config: RunConfigOption = None,
    replay: Annotated[str | None, typer.Option(metavar="ID", help="Put this message back on its stream.")] = None,
    override: OverrideOption = None,
) -> None:
    """List the dead letters of a run, which are messages that could not be processed, or put one back on its stream.

    - `spo dead runs/mine`
    - `spo dead -c my.yaml --replay 1718000000000-0`
    """
    settings = run_config(run, config, override or ())
    if replay is None:
        Console().print(dead_letters(settings))
        return
    with reopened(settings) as broker:
        Console().print(f"{replay} is back on stream {letters.replay(broker, replay)!r}")


def show(config: Config) -> RenderableType:
    progress, gone = _progress(config)
    state = "finished" if progress.finished else "running" if progress.processes else "no process is alive"
    heading = f"run {config.run.name}: step {progress.version}/{progress.steps}, {state}"
    if gone is not None and progress.processes:
        heading += f"; {gone_line(gone)}"
    newest = progress.evaluations[-1] if progress.evaluations else {}
    evaluated: list[RenderableType] = []
    if "figures" in newest:
        evaluated = [evaluation_table(newest["figures"], f"evaluation of version {newest['version']}"), ""]
    return Group(heading, "", figures(progress), "", *evaluated, process_rows(progress, {}))


def facts(config: Config) -> dict[str, Any]:
    """The state as JSON values: step, counters, evaluations, processes and the metrics of the newest step."""
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
        "waiting_for_scores": progress.scoring,
        "learner_gone_seconds": gone,
        "redis_memory": progress.memory._asdict(),
        "variance_ratio": progress.variance_ratio,
        "bottleneck": asdict(slow) if (slow := progress.bottleneck) else None,
        "metrics": _without_nan(progress.step.metrics) if progress.step else {},
    }


def _without_nan(value: Any) -> Any:
    """The value with None in place of NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {name: _without_nan(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _progress(config: Config) -> tuple[Progress, float | None]:
    """The run, and for how many seconds its learner has been gone; None if it is there or not needed."""
    with reopened(config) as broker:
        progress = Progress.of(broker, config)
        progress.refresh()
        return progress, None if progress.finished else learner_gone(broker)


def dead_letters(config: Config) -> RenderableType:
    """A table of the newest dead letters, with the prompt if the message is a task."""
    with reopened(config) as broker:
        newest = letters.list_dead(broker)
    if not newest:
        return f"run {config.run.name}: no dead letters"
    table = Table(box=None)
    for column in ("id", "stream", "kept since", "by", "prompt", "reason"):
        table.add_column(column)
    for entry_id, note in newest:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(note["at"]))
        # Prompts and reasons may contain anything, even control characters or markup.
        cells = (entry_id, note["stream"], when, note["by"], _prompt(note)[:PROMPT_CHARS], note["reason"])
        table.add_row(*(Text(one_line(cell)) for cell in cells))
    return table


def _prompt(note: dict[str, Any]) -> str:
    """The prompt of a task; empty for other messages and for unreadable ones."""
    try:
        return prompt_text(Task.unpack(note["fields"].get(b"task", b"")).prompt)
    except InvalidMessage:
        return ""
