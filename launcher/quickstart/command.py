"""The commands `spo quickstart` and `spo prepare`."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress as Bar

from common import log as logs
from common.scripts import OverrideOption
from launcher.layout.layout import Choice
from launcher.options import Generators, Plain, RedisOption
from launcher.quickstart.cache import cached_model
from launcher.quickstart.inputs import fresh_folder, quickstart_config, run_name, write_inputs
from launcher.run.local_run import RunOptions
from launcher.run.processes import EMBEDDED
from launcher.run.screen import Screen, show_run
from launcher.tasks import DEFAULT, TASKS, find_task
from launcher.tasks.task import QuickstartTask

SECONDS_BETWEEN_LINES = 5.0  # of progress without a live view

TaskOption = Annotated[
    str,
    typer.Option(
        metavar="TASK",
        help="What the model learns: " + "; ".join(f"`{task.name}`, {task.summary}" for task in TASKS.values()),
    ),
]

ExpertsOption = Annotated[
    int | None,
    typer.Option(
        min=2,
        help="Make the model a mixture of this many experts per layer, of which each token uses two; by default it is "
        "dense.",
    ),
]


def quickstart(
    task: TaskOption = DEFAULT.name,
    experts: ExpertsOption = None,
    generators: Generators = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the problems, of sampling and of prompt selection.")] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="Learner steps; by default as in the template.")] = None,
    plain: Plain = False,
    output: Annotated[Path, typer.Option(help="Folder in which the run folder is made.")] = Path("runs"),
    redis: RedisOption = EMBEDDED,
    override: OverrideOption = None,
) -> None:
    """Train a tiny model on one of six tasks: the whole pipeline on this machine, in minutes.

    It makes a small Qwen3 that mostly fails at first (the model is cached), problems, and a run folder; starts Redis,
    sampler, learner and generators; and shows the progress, with a table at the end.

    - `spo quickstart`
    - `spo quickstart --task code`
    - `spo quickstart --experts 8`
    - `spo quickstart --generators 2 --seed 1 --plain`
    - `spo quickstart -o sampler.batch_size=64 -o learner.lr=1e-3`
    """
    # Refuse invalid overrides before anything is made.
    chosen = _chosen(task, experts)
    quickstart_config(output / run_name(chosen, 0), seed, steps, override or (), chosen)
    folder = fresh_folder(output, chosen)
    screen = Screen.open(plain, folder)
    with screen.phases.during("warm start"):
        model = initial_model(chosen, screen.plain, screen.console, screen.log)
    write_inputs(folder / "inputs", model, seed, task=chosen)
    config = quickstart_config(folder, seed, steps, override or (), chosen)
    show_run(config, RunOptions(Choice(generators), redis), screen)


def prepare(
    folder: Annotated[
        Path | None, typer.Argument(help="Folder for model, *.jsonl and run.yaml; by default .cache/TASK.")
    ] = None,
    task: TaskOption = DEFAULT.name,
    experts: ExpertsOption = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the problems.")] = 0,
    parquet: Annotated[bool, typer.Option("--parquet", help="Also write the problems as Parquet.")] = False,
) -> None:
    """Make a task's tiny model, its problems, and run.yaml, a configuration to train on them.

    - `spo prepare && spo run .cache/arithmetic/run.yaml`
    - `spo prepare small --task code && spo run small/run.yaml`
    """
    chosen, console = _chosen(task, experts), Console()
    folder = folder or Path(".cache") / chosen.name
    model = initial_model(chosen, not console.is_terminal, console, logs.setup("launcher"))
    write_inputs(folder, model, seed, ("jsonl", "parquet") if parquet else ("jsonl",), chosen)
    template = chosen.template.read_text(encoding="utf-8")
    paths = re.compile(rf"\.cache/{re.escape(chosen.name)}(\S*)")
    # In quotes, so that YAML reads a text, whatever characters the folder's name has.
    text = paths.sub(lambda found: json.dumps(f"{folder}{found[1]}", ensure_ascii=False), template)
    (folder / "run.yaml").write_text(text, encoding="utf-8")
    console.print(f"{folder}: {', '.join(sorted(entry.name for entry in folder.iterdir()))}", markup=False)


def _chosen(name: str, experts: int | None) -> QuickstartTask:
    task = find_task(name)
    return task if experts is None else replace(task, recipe=replace(task.recipe, experts=experts))


def initial_model(task: QuickstartTask, plain: bool, console: Console, log: Any) -> Path:
    """Return the task's initial model; show a progress bar, or log lines, while it is trained."""
    if not plain:
        with Bar(console=console, transient=True) as bar:
            row = bar.add_task("looking for the warm-started model", total=None)

            def advance(step: int, steps: int, loss: float) -> None:
                bar.update(row, description=f"warm start, loss {loss:.3f}", completed=step, total=steps)

            return cached_model(task, advance)

    due = 0.0

    def line(step: int, steps: int, loss: float) -> None:
        nonlocal due
        if time.monotonic() >= due:
            due = time.monotonic() + SECONDS_BETWEEN_LINES
            log.info("warm start", step=f"{step}/{steps}", loss=loss)

    return cached_model(task, line)
