"""The command `spo sft`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from common import log as logs
from common.config import load_config
from common.process import keep_files_private
from common.scripts import ConfigArgument, OverrideOption
from launcher.evaluate.answer_run import AnswerScreen
from launcher.options import Generators
from launcher.run.processes import interruptible
from launcher.run.supervisor import EndedEarly
from launcher.sft.train import answering, train


def sft(
    config: ConfigArgument,
    ranks: Annotated[
        int, typer.Option(min=0, metavar="N", help="Ranks on this machine, each on a GPU of its own; 0: one per GPU.")
    ] = 0,
    evaluate: Annotated[
        bool,
        typer.Option("--eval", help="Answer data.heldout before training, every eval.every steps and at the end."),
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
    answer = answering(run, generators, AnswerScreen("held-out prompts", Console())) if evaluate else None
    log = logs.setup("launcher")
    try:
        with interruptible():
            trained = train(run, ranks, log, here=True, answer=answer)
    except EndedEarly as early:
        typer.echo(str(early))
        raise SystemExit(early.code) from None
    typer.echo(f"the trained model: {trained}")
    typer.echo(f"to train it further: spo run {config} -o model.path={trained.parents[1]}")
