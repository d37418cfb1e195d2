"""The command `spo sft`."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console

from common import log as logs
from common.checks.computing import visible_gpus
from common.config import Config, dump_config, load_config
from common.config.combinations import check_ranks
from common.errors import UserError
from common.files import checkpoint, checkpoint_versions, rewrite
from common.model import check_model_folder, exported_model
from common.process import keep_files_private
from common.scripts import ConfigArgument, OverrideOption
from launcher.options import Generators
from launcher.run.folder_lock import locked
from launcher.sft.settings import supervised, with_steps

STOPPED = 130
# Keys of the section that may change when training continues; the demonstrations are in the run folder.
MAY_CHANGE = ("epochs", "steps", "learner", "heldout", "experiment")


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
    settings = supervised(run)
    ranks = ranks or max(1, visible_gpus(dict(os.environ)).count)
    check_ranks(settings, ranks)
    check_model_folder(settings.model.path, tokenizer=True)
    if evaluate and run.data.heldout is None:
        raise UserError("--eval needs held-out prompts: set data.heldout")
    log = logs.setup("launcher")
    folder = settings.run.folder
    with locked(folder, "sft.experiment or run.output_dir"):
        settings = prepare(settings, log)
        is_trained = settings.run.steps in checkpoint_versions(folder)
        if is_trained and not evaluate:
            raise UserError(f"{folder} has been trained for {settings.run.steps} steps; more: -o sft.epochs=N")
        if not is_trained and not _train(settings, ranks, log):
            typer.echo(f"stopped; the same command continues from step {max(checkpoint_versions(folder), default=0)}")
            raise SystemExit(STOPPED)
        if evaluate:
            _evaluate(run, settings, generators, log)
    typer.echo(f"the trained model: {checkpoint(folder, settings.run.steps)}")
    typer.echo(f"to train it further: spo run {config} -o model.path={folder}")


def _evaluate(run: Config, trained: Config, generators: int | None, log: Any) -> None:
    """Answer the held-out prompts with the newest export, and add the figures to the run folder's metrics.

    Args:
        run: the configuration of the run that comes after, with its episodes and rewards.
    """
    from launcher.evaluate.answer_run import AnswerScreen
    from launcher.evaluate.evaluation import evaluate
    from launcher.run.summary import evaluation_table
    from sampler.files.metrics_file import Entry, MetricsFile

    console, folder, version = Console(), trained.run.folder, trained.run.steps
    path = exported_model(str(checkpoint(folder, version)))
    screen = AnswerScreen(path, console, plain=not console.is_terminal)
    output = folder / "evaluations" / f"{version}.jsonl"
    figures = evaluate(path, run, output=output, generators=generators, screen=screen)
    values = {f"validation/{name}": value for name, value in figures.items()}
    MetricsFile(folder, log, trained.run.metrics_bytes).append([Entry(version, "sampler", values)])
    console.print(evaluation_table(figures, path))


def prepare(config: Config, log: Any) -> Config:
    """Render the demonstrations into the run folder, and write the configuration there.

    They are not rendered again once there is a checkpoint.

    Returns:
        The configuration with the number of steps.

    Raises:
        UserError: no demonstration can be used, or the run folder is that of another training.
    """
    # Imported here, since the command line starts without what a generator needs.
    from launcher.sft.training import folders
    from learner.supervised.demonstrations import Demonstrations

    folder, (train, heldout) = config.run.folder, folders(config)
    _check_folder(config, train)
    if not checkpoint_versions(folder):
        shutil.rmtree(train.parent, ignore_errors=True)
        _render(config, train, heldout, log)
    demonstrations = Demonstrations.open(train)
    config = with_steps(config, len(demonstrations))
    log.info(
        "demonstrations",
        rows=len(demonstrations),
        tokens=demonstrations.tokens,
        trained_on=demonstrations.trained_tokens,
        steps=config.run.steps,
    )
    rewrite(folder / "config.yaml", [dump_config(config, absolute=True).encode()])
    return config


def _render(config: Config, train: Path, heldout: Path, log: Any) -> None:
    from generator.chat.token_text import load_tokenizer
    from launcher.sft.rows import RowReader, load_demonstrations

    sft = config.sft
    if sft.data is None:
        raise UserError("sft.data is missing: name the demonstrations, *.jsonl for example")
    reader = RowReader(config, load_tokenizer(config.model.path, config.model.trust_remote_code))
    load_demonstrations(config, sft.data, reader, "sft.data", "train", log).save(train)
    if sft.heldout is not None:
        load_demonstrations(config, sft.heldout, reader, "sft.heldout", "test", log).save(heldout)


def _check_folder(config: Config, train: Path) -> None:
    """Raise `UserError` if the run folder is that of a run, or of training with other settings."""
    folder, existing = config.run.folder, config.run.folder / "config.yaml"
    if not existing.exists():
        return
    if not train.exists():
        raise UserError(f"{folder} is the folder of another run; choose another sft.experiment")
    if not checkpoint_versions(folder):
        return
    before, now = (_fixed(yaml.safe_load(text)) for text in (existing.read_text(), dump_config(config, absolute=True)))
    for key, value in now.items():
        if before.get(key) != value:
            raise UserError(
                f"{folder} was trained with {key} = {before.get(key)!r}, and it is {value!r} now: continue with its "
                "value, or choose another sft.experiment"
            )


def _fixed(values: dict[str, Any]) -> dict[str, Any]:
    """What must not change when training continues, by key."""
    own = {f"sft.{key}": value for key, value in values.get("sft", {}).items() if key not in MAY_CHANGE}
    return own | {"run.seed": values["run"]["seed"], "model.path": values["model"]["path"]}


def _train(config: Config, ranks: int, log: Any) -> bool:
    """Train on this many ranks; returns whether it reached the end. Raises `SystemExit` if a rank failed."""
    from launcher.sft.training import UNFINISHED, train_here

    if ranks == 1:
        return train_here(config, log)
    from learner.ranks.launch import launch

    path = config.run.folder / "config.yaml"
    code = launch(ranks, ["--config", str(path)], UNFINISHED, module="launcher.sft.training")
    if code not in (0, UNFINISHED):
        raise SystemExit(code)
    return code == 0
