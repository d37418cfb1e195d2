"""What `spo chaos` does: a real run under a seeded schedule of faults, and an audit of its counts."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from rich.table import Table

from common.errors import UserError, visible
from launcher.audit.lines import AuditLine
from launcher.chaos import CHECKOUT, ChaosOptions
from launcher.quickstart.command import initial_model
from launcher.quickstart.inputs import fresh_folder, quickstart_config, write_inputs
from launcher.run.processes import interruptible
from launcher.run.screen import Screen
from launcher.run.started import RunStopped
from launcher.run.summary import table
from launcher.tasks import DEFAULT, agent, find_task
from launcher.tasks.task import QuickstartTask
from tests.chaos.injector import flag
from tests.chaos.parts import AGENTS_FAIL
from tests.chaos.run import ChaoticRun, write
from tests.chaos.schedule import CONTAINERS, TEACHERS, schedule

TASKS = (DEFAULT, agent.TASK)
STEPS_A_MINUTE = 20  # that two cores make while everything fails
# Failures are noticed soon, so that many fit into a run; and each commit of the sampler is kept.
SETTINGS = ["run.journal=true", "broker.dead_after=3", "learner.checkpoint_every=5"]
# The teacher is the initial model. It pulls the policy back, but so weakly that the policy learns all the same.
TEACHER_WEIGHT = "teacher.weight=0.01"


def run_chaos(options: ChaosOptions) -> None:
    """Run it, and print its table, the faults and every line of the audit; exit code 1 if one does not hold."""
    task = find_task(options.task)
    if task not in TASKS:
        raise UserError(f"--task {task.name}: chaos plays {' or '.join(one.name for one in TASKS)}")
    folder = fresh_folder(options.output, task)
    steps = options.steps or max(5, round(options.minutes * STEPS_A_MINUTE))
    taught = [f"teacher.model={folder / 'inputs' / 'model'}", TEACHER_WEIGHT] if options.teacher else []
    overrides = [*SETTINGS, *_parts(folder, task), *taught, *options.overrides]
    config = quickstart_config(folder, options.seed, steps, overrides, task)
    more = (TEACHERS if options.teacher else {}) | (CONTAINERS if config.uses_containers else {})
    faults = schedule(options.seed, options.without, more)
    screen = Screen.open(options.plain, folder)
    with screen.phases.during("warm start"):
        model = initial_model(task, screen.plain, screen.console, screen.log)
    write_inputs(folder / "inputs", model, options.seed, task=task)
    run, console = ChaoticRun(config, faults, 60 * options.minutes, screen.log), screen.console
    try:
        with interruptible():
            result = run.run(lambda: screen.view(config), screen.phases)
    except RunStopped as stopped:
        console.print(table(stopped.summary))
        console.print(f"{visible(str(stopped))}; repeat it with --seed {options.seed}", markup=False)
        raise SystemExit(stopped.code) from None
    checks = run.audit()
    if options.threshold is not None:
        accuracy = result.accuracy_after or 0.0
        problem = "" if accuracy >= options.threshold else f"it is {accuracy:.1%}"
        checks.append(AuditLine(f"held-out accuracy is at least {options.threshold:.0%}", problem))
    write(folder / "chaos.json", run, checks, result)
    console.print(table(result))
    console.print(faults_table(run.tally.done))
    for check in checks:
        console.print(str(check), markup=False, soft_wrap=True)
    if any(check.problem for check in checks):
        console.print(f"the counts do not agree; repeat it with --seed {options.seed}")
        raise SystemExit(1)


def _parts(folder: Path, task: QuickstartTask) -> list[str]:
    """The settings that name the tool or agent, and the reward, of `tests.chaos.parts`."""
    parts = {"tool": ("PanickingCalculator", "panic tools"), "reward": ("ForkingExact", "fork rewards")}
    options = {
        kind: {f"tests.chaos.parts:{name}": {"while_there": str(flag(folder.absolute(), fault))}}
        for kind, (name, fault) in parts.items()
    }
    settings = [f"run.modules={CHECKOUT}", f"episode.reward={next(iter(options['reward']))}"]
    if task is agent.TASK:
        os.environ[AGENTS_FAIL] = next(iter(options.pop("tool").values()))["while_there"]
        settings.append("episode.agent=tests.chaos.parts:solve")
    else:
        settings.append(f"episode.tools={json.dumps([*options['tool']])}")
    return [*settings, *(f"episode.{kind}_options={json.dumps(values)}" for kind, values in options.items())]


def faults_table(done: Mapping[str, int]) -> Table:
    made = Table(title="faults")
    made.add_column("kind")
    made.add_column("done", justify="right")
    for kind in sorted(done):
        made.add_row(kind, f"{done[kind]}")
    made.add_row("all", f"{sum(done.values())}", style="bold")
    return made
