"""The command `spo`: the quickstart, whole runs on one machine, and the inspection of runs."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress as Bar

from common import log as logs
from common.checks.list import check_run
from common.config import Config, dump_config, load_config
from common.config.warnings import warnings
from common.errors import UserError, visible
from common.process import keep_files_private
from common.scripts import HELP, ConfigArgument, OverrideOption, ResumeOption, VersionOption, entry_point
from launcher import correction, inspection
from launcher.chaos.command import chaos
from launcher.checks.command import doctor
from launcher.checks.report import report as findings_report
from launcher.compare.command import compare
from launcher.config_reference import reference
from launcher.dashboard.command import dashboard
from launcher.data import command as data_command
from launcher.episodes.command import episodes
from launcher.evaluate.command import eval_
from launcher.export import export
from launcher.fork import fork
from launcher.options import Generators, Plain, RedisOption, RunArgument, RunConfigOption, run_config
from launcher.quickstart.cache import cached_model
from launcher.quickstart.inputs import fresh_folder, quickstart_config, run_name, write_inputs
from launcher.report import report
from launcher.run.display import LiveView, PlainView, View
from launcher.run.local_run import Stopped, run_here
from launcher.run.phase_timer import PhaseTimer
from launcher.run.processes import EMBEDDED, default_generators
from launcher.run.summary import next_steps, table
from launcher.tasks import DEFAULT, TASKS, find_task
from launcher.tasks.task import Task
from launcher.trace import trace
from launcher.values import command as values

SECONDS_BETWEEN_LINES = 5.0  # of a long work without a live view

app = typer.Typer(
    help="SPO: asynchronous single-stream policy optimization of language models.\n\n"
    "Start with `spo quickstart`; then `spo run CONFIG` with a configuration of your own, or the processes one by "
    "one: spo-sampler, spo-learner and any number of spo-generator.",
    context_settings=HELP,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


@app.callback()
def spo(version: VersionOption = False) -> None:
    """Whatever command follows."""


app.add_typer(correction.app, name="correction")
app.add_typer(values.app, name="values")
app.add_typer(data_command.app, name="data")

TaskOption = Annotated[
    str,
    typer.Option(
        metavar="TASK",
        help="What is learned: " + "; ".join(f"`{task.name}`, {task.summary}" for task in TASKS.values()),
    ),
]


@app.command("quickstart")
def quickstart_(
    task: TaskOption = DEFAULT.name,
    generators: Generators = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the problems, of sampling and of prompt selection.")] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="Learner steps; by default as in the template.")] = None,
    plain: Plain = False,
    output: Annotated[Path, typer.Option(help="Folder to make the run folder in.")] = Path("runs"),
    redis: RedisOption = EMBEDDED,
    override: OverrideOption = None,
) -> None:
    """Train a tiny model on one of five tasks: the whole pipeline on this machine, in minutes.

    Makes a small Qwen3 that mostly fails (it is cached), problems, and a run folder; starts Redis, sampler, learner and
    generators; shows progress, and a table at the end.

    - `spo quickstart`
    - `spo quickstart --task code`
    - `spo quickstart --generators 2 --seed 1 --plain`
    - `spo quickstart -o sampler.batch_size=64 -o learner.lr=1e-3`
    """
    phases = PhaseTimer()
    phases.enter("set-up")
    # Overrides that cannot work are refused before anything is made.
    chosen = find_task(task)
    quickstart_config(output / run_name(chosen, 0), seed, steps, override or (), chosen)
    folder = fresh_folder(output, chosen)
    console = Console()
    plain = plain or not console.is_terminal
    log = _log(plain, folder)
    with phases.during("warm start"):
        model = _initial_model(chosen, plain, console, log)
    write_inputs(folder / "inputs", model, seed, task=chosen)
    config = quickstart_config(folder, seed, steps, override or (), chosen)
    _run(config, generators, redis, plain, console, log, phases)


@app.command()
def run(
    config: ConfigArgument,
    generators: Generators = None,
    redis: RedisOption = EMBEDDED,
    plain: Plain = False,
    dry: Annotated[
        bool,
        typer.Option("--dry-run", help="Load all but weights, start nothing, and say what would not work (code 2)."),
    ] = False,
    resume: ResumeOption = False,
    override: OverrideOption = None,
) -> None:
    """Run everything on this machine: Redis, sampler, learner and generators, supervised.

    A run that was stopped continues when it is started again with the same configuration; with --resume, also one whose
    Redis is lost.

    - `spo run my.yaml`
    - `spo run my.yaml --dry-run`
    - `spo run my.yaml --generators 3 --redis redis://10.0.0.5:6379/0 -o run.steps=500`
    """
    settings = load_config(config, override or ())
    if dry:
        from launcher.checks.dry_run import dry_run  # imports what the processes import

        raise SystemExit(findings_report(dry_run(settings, logs.setup("launcher"))))
    phases = PhaseTimer()
    phases.enter("set-up")
    console = Console()
    plain = plain or not console.is_terminal
    log = _log(plain, settings.run.folder)
    _run(settings, generators, redis, plain, console, log, phases, resume)


@app.command()
def prepare(
    folder: Annotated[
        Path | None, typer.Argument(help="For model, train.jsonl, heldout.jsonl and run.yaml; by default .cache/TASK.")
    ] = None,
    task: TaskOption = DEFAULT.name,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the problems.")] = 0,
    parquet: Annotated[bool, typer.Option("--parquet", help="Write the problems as Parquet too.")] = False,
) -> None:
    """Make a task's tiny model, its problems, and a configuration to train on them, run.yaml.

    - `spo prepare && spo run .cache/arithmetic/run.yaml`
    - `spo prepare small --task code && spo run small/run.yaml`
    """
    chosen, console = find_task(task), Console()
    folder = folder or Path(".cache") / chosen.name
    model = _initial_model(chosen, not console.is_terminal, console, logs.setup("launcher"))
    write_inputs(folder, model, seed, ("jsonl", "parquet") if parquet else ("jsonl",), chosen)
    template = chosen.template.read_text(encoding="utf-8")
    (folder / "run.yaml").write_text(template.replace(f".cache/{chosen.name}", str(folder)), encoding="utf-8")
    console.print(f"{folder}: {', '.join(sorted(entry.name for entry in folder.iterdir()))}")


@app.command()
def status(
    run: RunArgument = None,
    config: RunConfigOption = None,
    override: OverrideOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON, for programs.")] = False,
) -> None:
    """Show the state of a run, going on or over: its processes, its step, its held-out accuracy.

    - `spo status runs/quickstart-1`
    - `spo status -c my.yaml -o broker.url=redis://10.0.0.5:6379/0`
    - `spo status -c my.yaml --json | jq .counters`
    """
    settings = run_config(run, config, override or ())
    if as_json:
        typer.echo(json.dumps(inspection.facts(settings)))
    else:
        Console().print(inspection.status(settings))


@app.command()
def dead(
    run: RunArgument = None,
    config: RunConfigOption = None,
    replay: Annotated[str | None, typer.Option(metavar="ID", help="Put this letter back on its stream.")] = None,
    override: OverrideOption = None,
) -> None:
    """List the dead letters of a run, messages that could not be processed, or put one back on its stream.

    - `spo dead runs/mine`
    - `spo dead -c my.yaml --replay 1718000000000-0`
    """
    settings = run_config(run, config, override or ())
    console = Console()
    if replay is None:
        console.print(inspection.dead_letters(settings))
    else:
        console.print(f"{replay} is back on stream {inspection.replay(settings, replay)!r}")


app.command("episodes")(episodes)
app.command("dashboard")(dashboard)
app.command("doctor")(doctor)
app.command("eval")(eval_)
app.command("fork")(fork)
app.command("export")(export)
app.command("report")(report)
app.command("compare")(compare)
app.command("trace")(trace)
app.command("chaos")(chaos)


@app.command()
def keys(folder: Annotated[Path, typer.Argument(help="A folder for the four files.")]) -> None:
    """Make the CURVE keys that protect the weight socket across machines (learner.weights.curve_dir).

    - `spo keys keys/`
    """
    from common.curve import make_keys  # imports pyzmq, which not every role has

    for path in make_keys(folder):
        sys.stdout.write(f"{path}\n")


@app.command("config")
def config_(config: ConfigArgument, override: OverrideOption = None) -> None:
    """Print the resolved configuration: file, environment and command line together, every key spelled out.

    Settings without effect are named on stderr.

    - `SPO__LEARNER__LR=1e-5 spo config my.yaml -o run.steps=500`
    """
    settings = load_config(config, override or ())
    sys.stdout.write(dump_config(settings))
    for line in warnings(settings):
        sys.stderr.write(f"warning: {line}\n")


@app.command("docs-config", hidden=True)
def docs_config() -> None:
    """Print docs/configuration.md."""
    sys.stdout.write(reference())


def _log(plain: bool, folder: Path) -> Any:
    """The launcher's own log: on stderr, or in a file while the live view has the screen."""
    keep_files_private()
    logs_folder = folder / "logs"
    try:
        logs_folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"run folder {folder} cannot be made: {error.strerror}; set run.output_dir") from None
    return logs.setup("launcher", file=None if plain else logs_folder / "launcher.log")


def _initial_model(task: Task, plain: bool, console: Console, log: Any) -> Path:
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


def _run(
    config: Config,
    generators: int | None,
    redis: str,
    plain: bool,
    console: Console,
    log: Any,
    phases: PhaseTimer,
    resume: bool = False,
) -> None:
    for line in warnings(config):
        log.warning(line)
        if not plain:
            # With the live view the log goes to a file.
            console.print(f"warning: {line}", style="yellow", markup=False, highlight=False)

    def view() -> View:
        return PlainView(log) if plain else LiveView(console, str(config.run.folder))

    try:
        summary = run_here(
            config,
            generators=generators or default_generators(config),
            redis=redis,
            view=view,
            log=log,
            phases=phases,
            resume=resume,
            check=check_run,
        )
    except Stopped as stopped:
        console.print(table(stopped.summary))
        line = f"{stopped}; to go on: spo run {stopped.summary.folder}/config.yaml"
        console.print(visible(line), markup=False, highlight=False)
        raise SystemExit(stopped.code) from None
    console.print(table(summary))
    console.print(visible(next_steps(summary)), markup=False, highlight=False, soft_wrap=True)


main = entry_point(app)

if __name__ == "__main__":
    main()
