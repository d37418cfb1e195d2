"""The command `spo chaos`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from common import log as logs
from common.errors import visible
from common.process import keep_files_private
from common.scripts import OverrideOption
from launcher.chaos.schedule import schedule
from launcher.options import Plain
from launcher.quickstart.cache import cached_model
from launcher.quickstart.inputs import fresh_folder, quickstart_config, write_inputs
from launcher.run.display import LiveView, PlainView
from launcher.run.local_run import Stopped
from launcher.run.phase_timer import PhaseTimer
from launcher.run.summary import table
from launcher.tasks import DEFAULT

STEPS_A_MINUTE = 20  # that two cores make while everything fails
# Failures are noticed soon, so that many fit into a run; and each commit of the sampler is kept.
SETTINGS = ["run.journal=true", "broker.heartbeat=0.5", "broker.dead_after=3", "learner.checkpoint_every=5"]


def chaos(
    minutes: Annotated[float, typer.Option(min=0.1, help="How long faults are done, from the first step on.")] = 2.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the faults, and of the run.")] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="Learner steps; by default as many as fit.")] = None,
    threshold: Annotated[
        float | None, typer.Option(min=0, max=1, help="Held-out accuracy that the run must reach.")
    ] = None,
    without: Annotated[
        list[str] | None, typer.Option(metavar="FAULT", help="Leave out this kind, several times if you like.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder to make the run folder in.")] = Path("runs"),
    plain: Plain = False,
    override: OverrideOption = None,
) -> None:
    """Do a real run harm, by a schedule drawn from a seed, and audit its books: nothing lost, nothing counted twice.

    The quickstart's run, with all its processes, while they are killed and frozen, their connections to Redis cut, held
    and slowed down, replies lost, Redis killed, its log cut, memory and disk full, and generators come and go. What it
    did is compared with the journal of the sampler's commits. Exit code 1: the books do not balance.

    - `spo chaos`
    - `spo chaos --minutes 15 --seed 3 --threshold 0.9`
    """
    keep_files_private()
    from launcher.chaos.audit import Check  # imports numpy, as the sampler does
    from launcher.chaos.chaotic_run import ChaoticRun, write

    faults = schedule(seed, without or ())
    console = Console()
    plain = plain or not console.is_terminal
    folder = fresh_folder(output)
    logs_folder = folder / "logs"
    logs_folder.mkdir(parents=True, exist_ok=True)
    log = logs.setup("launcher", file=None if plain else logs_folder / "launcher.log")
    phases = PhaseTimer()
    phases.enter("set-up")
    with phases.during("warm start"):
        model = cached_model(DEFAULT, lambda step, steps, loss: None)
    write_inputs(folder / "inputs", model, seed)
    count = steps or max(5, round(minutes * STEPS_A_MINUTE))
    config = quickstart_config(folder, seed, count, [*SETTINGS, *(override or ())])
    run = ChaoticRun(config, faults, 60 * minutes, log)
    try:
        result = run.run(lambda: PlainView(log) if plain else LiveView(console, str(config.run.folder)), phases)
    except Stopped as stopped:
        console.print(table(stopped.summary))
        console.print(f"{visible(str(stopped))}; repeat it with --seed {seed}", markup=False)
        raise SystemExit(stopped.code) from None
    checks = run.audit()
    if threshold is not None:
        accuracy = result.accuracy_after or 0.0
        problem = "" if accuracy >= threshold else f"it is {accuracy:.1%}"
        checks.append(Check(f"held-out accuracy is at least {threshold:.0%}", problem))
    write(folder / "chaos.json", run, checks, result)
    console.print(table(result))
    console.print(faults_table(run.tally.done))
    for check in checks:
        verdict = f"FAILED  {check.name}: {visible(check.problem)}" if check.problem else f"holds   {check.name}"
        console.print(verdict, markup=False)
    if any(check.problem for check in checks):
        console.print(f"the books do not balance; repeat it with --seed {seed}")
        raise SystemExit(1)


def faults_table(done: Mapping[str, int]) -> Table:
    """How many of each kind there were."""
    made = Table(title="faults")
    made.add_column("kind")
    made.add_column("done", justify="right")
    for kind in sorted(done):
        made.add_row(kind, f"{done[kind]}")
    made.add_row("all", f"{sum(done.values())}", style="bold")
    return made
