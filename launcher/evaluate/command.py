"""The command `spo eval`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from common.config import load_config
from common.scripts import OverrideOption
from launcher.evaluate.answer_run import AnswerScreen
from launcher.evaluate.evaluation import evaluate, model_path
from launcher.options import Generators, Plain, RedisOption
from launcher.run.processes import EMBEDDED
from launcher.run.summary import evaluation_table


def eval_(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A model folder, a Hugging Face name, a run folder, or a checkpoint."),
    ],
    config: Annotated[Path, typer.Option("--config", "-c", help="YAML file with data columns, episode and reward.")],
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]DATA", help="Held-out prompts; may be given several times; by default data.heldout."
        ),
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Responses to each prompt; by default eval.samples.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="File to keep the responses in, *.jsonl.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON, for programs.")] = False,
    generators: Generators = None,
    redis: RedisOption = EMBEDDED,
    plain: Plain = False,
    override: OverrideOption = None,
) -> None:
    """Evaluate a model: answer every held-out prompt several times, and show avg@k, maj@k and pass@k of each data set.

    The section `eval` sets how responses are sampled. With --output, the same command continues after it was stopped or
    killed. With --redis URL, generators that serve there join (spo-generator with this MODEL as model.path and
    run.steps=0).

    - `spo eval runs/quickstart-1/checkpoints/step_60 -c runs/quickstart-1/config.yaml`
    - `spo eval Qwen/Qwen3-8B -c maths.yaml --data aime.jsonl --data hmmt=hmmt25.parquet --samples 8`
    - `spo eval ./model -c maths.yaml --samples 32 --output aime.jsonl --json | jq '."maj@32"'`
    """
    settings, path = load_config(config, override or ()), model_path(model)
    # With --json, only the result goes to stdout.
    console = Console(stderr=as_json)
    screen = AnswerScreen(path, console, plain or as_json)
    with screen.command():
        figures = evaluate(
            path, settings, data=data or (), samples=samples, output=output, generators=generators, redis=redis,
            screen=screen,
        )  # fmt: skip
    if as_json:
        numbers = {name: None if math.isnan(value) else value for name, value in figures.items()}
        typer.echo(json.dumps({"model": path, **numbers}))
    else:
        console.print(evaluation_table(figures, path))
