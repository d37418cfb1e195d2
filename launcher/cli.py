"""The command `spo`: subcommands in five groups, each in the order in which a newcomer needs them."""

from __future__ import annotations

import errno
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from common import log as logs
from common.config import dump_config, load_config
from common.config.warnings import warnings
from common.errors import UserError
from common.parts import find_parts
from common.scripts import HELP, ConfigArgument, OverrideOption, ResumeOption, VersionOption, entry_point
from launcher import agent, config_reference, correction
from launcher.audit.command import audit
from launcher.chaos import chaos
from launcher.checkpoints import export, fork
from launcher.checks import data
from launcher.checks.command import doctor
from launcher.checks.command import report as report_findings
from launcher.compare import compare
from launcher.dashboard.command import dashboard
from launcher.demonstrations.right_answers import demonstrations
from launcher.episodes import episodes
from launcher.evaluate.command import eval_
from launcher.init import init
from launcher.layout.layout import Choice
from launcher.options import GeneratorGpus, Generators, LearnerGpus, Plain, RedisOption, TeacherGpus
from launcher.quickstart.command import prepare, quickstart
from launcher.report import report
from launcher.run.local_run import RunOptions
from launcher.run.processes import EMBEDDED
from launcher.run.screen import Screen, show_run
from launcher.sft.command import sft
from launcher.status import dead, status
from launcher.trace import trace
from launcher.values import command as values

# Other trainers' names for our commands.
SYNONYMS = {"train": "run", "start": "run", "resume": "run", "evaluate": "eval"}

UNUSABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG)  # what is wrong with a path of the user's


class InGroups(TyperGroup):
    """Lists the commands in the order of `GROUPS`; Typer itself would put commands with subcommands last."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in SYNONYMS:
            ctx.fail(f"No such command '{args[0]}'. Did you mean '{SYNONYMS[args[0]]}'?")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except OSError as error:
            # A path's `exists`, `is_dir` and `is_file` raise these; many folders are looked at before they are opened.
            if error.filename is None or error.errno not in UNUSABLE:
                raise
            raise UserError(f"{error.filename} cannot be used: {error.strerror}") from None

    def list_commands(self, ctx: Any) -> list[str]:
        names = [name for commands in GROUPS.values() for name, _, _ in commands]
        return [*names, *(name for name in super().list_commands(ctx) if name not in names)]


app = typer.Typer(
    cls=InGroups,
    help="SPO: asynchronous single-stream policy optimization of language models.\n\n"
    "Start with `spo quickstart`; then use `spo run CONFIG` with your own configuration, or start the processes one by "
    "one: spo-sampler, spo-learner and any number of spo-generator.",
    context_settings=HELP,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


@app.callback()
def spo(version: VersionOption = False) -> None:
    """Options before the command."""


def run(
    config: ConfigArgument,
    generators: Generators = None,
    learner_gpus: LearnerGpus = None,
    generator_gpus: GeneratorGpus = None,
    teacher_gpus: TeacherGpus = None,
    redis: RedisOption = EMBEDDED,
    plain: Plain = False,
    dry: Annotated[
        bool,
        typer.Option("--dry-run", help="Load all but weights, start nothing, report what would fail (exit code 2)."),
    ] = False,
    resume: ResumeOption = False,
    override: OverrideOption = None,
) -> None:
    """Run everything on this machine: Redis, sampler, learner, generators and teachers, supervised.

    A stopped run continues when it is started again with the same configuration; with --resume, even after its Redis
    data was lost.

    Each rank, generator and teacher gets GPUs of its own; --dry-run shows which, and why.

    - `spo run my.yaml`
    - `spo run my.yaml --dry-run`
    - `spo run my.yaml --learner-gpus 0-3 --generator-gpus 4-7`
    - `spo run my.yaml --generators 3 --redis redis://10.0.0.5:6379/0 -o run.steps=500`
    """
    settings = load_config(config, override or ())
    choice = Choice(generators, learner_gpus, generator_gpus, teacher_gpus)
    if dry:
        from launcher.checks.dry_run import dry_run  # imports what the processes import

        raise SystemExit(report_findings(dry_run(settings, choice, logs.setup("launcher"))))
    from launcher.checks.start import check_before_start  # imports what rewards import

    options = RunOptions(choice, redis, resume, check=check_before_start)
    show_run(settings, options, Screen.open(plain, settings.run.folder))


def keys(folder: Annotated[Path, typer.Argument(help="Folder for the four key files.")]) -> None:
    """Make the CURVE keys that protect the weight socket across machines (learner.weights.curve_dir).

    - `spo keys keys/`
    """
    from common.curve import make_keys  # imports pyzmq, which not every role has

    for path in make_keys(folder):
        sys.stdout.write(f"{path}\n")


def config_(
    config: Annotated[Path | None, typer.Argument(metavar="CONFIG", help="The run's YAML file.")] = None,
    override: OverrideOption = None,
    explain: Annotated[
        str | None, typer.Option("--explain", metavar="KEY", help="Say what a key means, or which keys a section has.")
    ] = None,
    search: Annotated[
        str | None, typer.Option("--search", metavar="WORD", help="List the keys with a word in name or meaning.")
    ] = None,
) -> None:
    """Print the resolved configuration: file, environment and command line merged, with every key.

    Settings without effect are reported on stderr. Functions of your own are looked for by name, but not imported.

    - `SPO__LEARNER__LR=1e-5 spo config my.yaml -o run.steps=500`
    - `spo config --explain sampler.selection.criterion`
    - `spo config --search checkpoint`
    """
    if explain is not None:
        sys.stdout.write(config_reference.explain(explain))
        return
    if search is not None:
        sys.stdout.write(config_reference.search(search))
        return
    if config is None:
        raise UserError("name a configuration: spo config my.yaml; or give --explain KEY or --search WORD")
    settings = load_config(config, override or ())
    find_parts(settings)
    sys.stdout.write(dump_config(settings))
    for line in warnings(settings):
        sys.stderr.write(f"warning: {line}\n")


@app.command("docs-metrics", hidden=True)
def docs_metrics() -> None:
    """Print the tables of docs/metrics.md."""
    from launcher.metrics_reference import tables

    sys.stdout.write("\n".join(f"## {title}\n\n{table}" for title, table in tables().items()))


@app.command("docs-config", hidden=True)
def docs_config() -> None:
    """Print docs/configuration.md."""
    sys.stdout.write(config_reference.reference())


@app.command("docs-python", hidden=True)
def docs_python() -> None:
    """Print docs/python.md."""
    from launcher.python_reference import page

    sys.stdout.write(page(import_module("spo")))  # the package is a layer above this one


data.app.command("demonstrations")(demonstrations)
# The commands of each group: name, function, and line in `spo --help`.
GROUPS: dict[str, list[tuple[str, Any, str]]] = {
    "Run": [
        ("quickstart", quickstart, "Train a tiny model on one of six tasks, in minutes."),
        ("init", init, "Write a configuration for a data set, from what its rows hold."),
        ("run", run, "Run a configuration on this machine; --dry-run only tries it."),
        ("sft", sft, "Train a model on demonstrations, before a run."),
        ("fork", fork, "Start a new run from a checkpoint of another."),
        ("prepare", prepare, "Make a quickstart task's model, problems and run.yaml."),
        ("keys", keys, "Make the keys that protect weights between machines."),
    ],
    "Look": [
        ("status", status, "Show the state of a run, live or finished."),
        ("dashboard", dashboard, "Show runs on one page in the browser, live."),
        ("episodes", episodes, "List the episodes that a run kept, or show one."),
        ("report", report, "Write one HTML page about a run."),
        ("compare", compare, "Compare the settings and the results of runs."),
        ("trace", trace, "Write a trace of what each process did, for Perfetto."),
        ("dead", dead, "List messages that could not be processed, or retry one."),
    ],
    "Check": [
        ("doctor", doctor, "Check this machine and a run's services before a start."),
        ("config", config_, "Print the resolved configuration with every key."),
        ("agent", agent.app, "Play one task with a configuration's agent, and show its requests."),
        ("audit", audit, "Check that a run lost nothing and counted nothing twice."),
        ("chaos", chaos, "Run under faults and check that nothing is lost or counted twice."),
        ("correction", correction.app, "Explain off-policy corrections, and the one a run uses."),
    ],
    "Data": [
        ("data", data.app, "Read every row of a run's data, and report what is in it."),
        ("values", values.app, "Estimate prompts' values before a run starts."),
    ],
    "Model": [
        ("eval", eval_, "Evaluate a model on held-out prompts: avg@k, maj@k, pass@k."),
        ("export", export, "Write a checkpoint's model for transformers and vLLM."),
    ],
}
for group, commands in GROUPS.items():
    for name, command, line in commands:
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name, rich_help_panel=group, short_help=line)
        else:
            app.command(name, rich_help_panel=group, short_help=line)(command)

main = entry_point(app)

if __name__ == "__main__":
    main()
