"""The command `spo sft`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from common import log as logs
from common.config import Config, load_config
from common.errors import UserError
from common.model import exported_model
from common.process import keep_files_private
from common.scripts import ConfigArgument, OverrideOption
from launcher.options import Generators
from launcher.run.processes import EndedEarly
from launcher.sft.train import train


def sft(
    config: ConfigArgument,
    ranks: Annotated[
        int, typer.Option(min=0, metavar="N", help="Ranks on this machine, each on a GPU of its own; 0: one per GPU.")
    ] = 0,
    evaluate: Annotated[
        bool, typer.Option("--eval", help="Then answer data.heldout with the trained model, as spo eval does.")
    ] = False,
    generators: Generators = None,
    override: OverrideOption = None,
) -> None:
    """Train a model on demonstrations, before a run: rows of messages, of prompt and completion, or recorded episodes.

    It takes the same YAML file as `spo run`; the section `sft` names the demonstrations. A stopped training continues
    when it is started again.

    - `spo sft my.yaml -o sft.data=demonstrations.jsonl`
    - `spo sft my.yaml -o sft.epochs=3 -o 'sft.learner={lr: 1e-5, schedule: cosine, warmup_steps: 20}' --ranks 8`
    - `spo run my.yaml -o model.path=runs/sft`
    """
    keep_files_private()
    run = load_config(config, override or ())
    if evaluate and run.data.heldout is None:
        raise UserError("--eval needs held-out prompts: set data.heldout")
    log = logs.setup("launcher")
    try:
        trained = train(run, ranks, log, here=True)
    except EndedEarly as early:
        typer.echo(str(early))
        raise SystemExit(early.code) from None
    if evaluate:
        _evaluate(run, trained, generators, log)
    typer.echo(f"the trained model: {trained}")
    typer.echo(f"to train it further: spo run {config} -o model.path={trained.parents[1]}")


def _evaluate(run: Config, trained: Path, generators: int | None, log: Any) -> None:
    """Answer the held-out prompts with a checkpoint's export, and add the figures to the metrics of its run folder.

    Args:
        run: the configuration of the run that comes after, with its episodes and rewards.
    """
    from launcher.evaluate.answer_run import AnswerScreen
    from launcher.evaluate.evaluation import evaluate
    from launcher.run.summary import evaluation_table
    from sampler.files.metrics_file import Entry, MetricsFile

    console, folder, version = Console(), trained.parents[1], int(trained.name.removeprefix("step_"))
    path = exported_model(str(trained))
    screen = AnswerScreen(path, console, plain=not console.is_terminal)
    output = folder / "evaluations" / f"{version}.jsonl"
    figures = evaluate(path, run, output=output, generators=generators, screen=screen)
    values = {f"validation/{name}": value for name, value in figures.items()}
    MetricsFile(folder, log, run.run.metrics_bytes).append([Entry(version, "sampler", values)])
    console.print(evaluation_table(figures, path))
