"""The command `spo eval`."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from common.config import Config, load_config
from common.config.data import DataSource, source_name
from common.errors import UserError
from common.model import check_model_folder, exported_model
from common.scripts import OverrideOption
from launcher.evaluate.answer_run import answer
from launcher.options import Generators, Plain, RedisOption
from launcher.run.processes import EMBEDDED
from launcher.run.summary import evaluation_table
from sampler.evaluation_metrics import Response, summarize_groups
from sampler.files.answer_file import Request, read_answers


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
    if output is not None and output.suffix != ".jsonl":
        raise UserError(f"--output {output} must be a file *.jsonl: responses are written as JSON lines")
    settings = _with_data(load_config(config, override or ()), data or [])
    path = model_path(model)
    settings = settings.model_copy(update={"model": settings.model.model_copy(update={"path": path})})
    # With --json, only the result goes to stdout.
    console = Console(stderr=as_json)
    temporary = None if output else Path(tempfile.mkdtemp(prefix="spo-eval-"))
    file = output or Path(str(temporary)) / "answers.jsonl"
    k = samples or settings.eval.samples
    request = Request("eval", k, file)
    try:
        count = answer(
            settings, request, title=path, generators=generators, redis=redis, plain=plain or as_json, console=console
        )
    except UserError:
        if temporary is not None:
            shutil.rmtree(temporary)
        raise
    figures = evaluate(read_answers(file), count.wanted - count.answered, k, settings.right_from)
    if temporary is not None:
        shutil.rmtree(temporary)
    if as_json:
        numbers = {name: None if math.isnan(value) else value for name, value in figures.items()}
        typer.echo(json.dumps({"model": path, **numbers}))
    else:
        console.print(evaluation_table(figures, path))


def evaluate(rows: Iterable[dict[str, Any]], missing: int, samples: int, right_from: float) -> dict[str, float]:
    """Figures over all answers, over each data set if there are several, and over each value of `eval.by_column`.

    Args:
        rows: lines of the file.
        missing: answers that were skipped.
        samples: answers to each prompt.
    """
    responses, groups = [], []
    for row in rows:
        # The same prompt may be in two data sets.
        prompt = f"{row['source']}/{row['prompt_id']}"
        responses.append(Response(prompt, float(row["score"]), str(row["answer"])))
        groups.append([str(name) for name in row["groups"]])
    return summarize_groups(responses, groups, samples, right_from) | {"set_aside": float(missing)}


def model_path(model: str) -> str:
    """The model folder that MODEL names, which for a run or a checkpoint is an export; raises `UserError`."""
    path = exported_model(model, "MODEL")
    if Path(path).is_dir() and not (Path(path) / "config.json").is_file():
        raise UserError(
            f"MODEL {model} is neither a model folder (config.json) nor a checkpoint with an export (hf/config.json); "
            "learner.export=true writes exports"
        )
    check_model_folder(path)
    return path


def _with_data(config: Config, data: list[str]) -> Config:
    """The configuration with the held-out sets of the command line; a known NAME keeps its settings except the path."""
    if not data:
        if config.data.heldout is None:
            raise UserError("there are no held-out prompts: give --data, or set data.heldout")
        return config
    configured = config.data.heldout if isinstance(config.data.heldout, list) else []
    by_name = {source_name(item): item for item in configured}
    sources = []
    for text in data:
        name, equals, path = text.partition("=")
        if not equals:
            sources.append(DataSource(path=text))
        else:
            sources.append(by_name.get(name, DataSource(path=path)).model_copy(update={"path": path, "name": name}))
    names = [source_name(source) for source in sources]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise UserError(f"--data names {twice[0]!r} twice; give names, as in --data a={sources[0].path}")
    return config.model_copy(update={"data": config.data.model_copy(update={"heldout": sources})})
