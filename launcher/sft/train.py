"""Supervised training from rows to a checkpoint: the work of `spo sft` and of `spo.sft`."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import yaml

from common.checks.computing import visible_gpus
from common.config import Config, dump_config
from common.config.combinations import check_ranks
from common.errors import UserError
from common.files import checkpoint, checkpoint_versions, rewrite
from common.model import check_model_folder
from launcher.demonstrations.render import render
from launcher.run.folder_lock import locked
from launcher.run.processes import INTERRUPTED, EndedEarly
from launcher.sft.rank import UNFINISHED, train_here
from launcher.sft.settings import supervised, with_steps
from learner.batch.demonstrations import Demonstrations, folder_of

# Keys of the section that may change when training continues; the demonstrations are in the run folder.
MAY_CHANGE = ("epochs", "steps", "learner", "heldout")


def train(run: Config, ranks: int, log: Any, *, here: bool) -> Path:
    """Train on the demonstrations of `run.sft`, from the newest checkpoint on; see `spo.sft`.

    Args:
        run: the configuration of the run that comes after.
        ranks: on this machine; 0: one for each GPU.
        here: a single rank trains in this process, and not in one of its own.

    Returns:
        The folder of the last checkpoint.

    Raises:
        UserError: the model, the demonstrations or the run folder cannot be used, or training diverges.
        EndedEarly: a signal stopped it after a checkpoint, or a rank failed.
    """
    config = supervised(run)
    ranks = ranks or max(1, visible_gpus(dict(os.environ)).count)
    check_ranks(config, ranks)
    check_model_folder(config.model.path, tokenizer=True)
    folder = config.run.folder
    with locked(folder, "sft.experiment or run.output_dir"):
        config = prepare(config, log)
        if config.run.steps in checkpoint_versions(folder):
            log.info("trained already; for more, raise sft.epochs or sft.steps", steps=config.run.steps)
        elif not _train(config, ranks, log, here):
            newest = max(checkpoint_versions(folder), default=0)
            raise EndedEarly(f"stopped; the same configuration continues from step {newest}", INTERRUPTED)
    return checkpoint(folder, config.run.steps)


def prepare(config: Config, log: Any) -> Config:
    """Render the demonstrations into the run folder, and write the configuration there.

    They are not rendered again once there is a checkpoint.

    Returns:
        The configuration with the number of steps.

    Raises:
        UserError: no demonstration can be used, or the run folder is that of another training.
    """
    folder, train = config.run.folder, folder_of(config, "train")
    _check_folder(config, train)
    if not checkpoint_versions(folder):
        shutil.rmtree(train.parent, ignore_errors=True)
        if config.sft.data is None:
            raise UserError("sft.data is missing: name the demonstrations, *.jsonl for example")
        render(config, config.sft.data, "sft.data", "train", train, log)
        if config.sft.heldout is not None:
            render(config, config.sft.heldout, "sft.heldout", "test", folder_of(config, "heldout"), log)
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


def _train(config: Config, ranks: int, log: Any, here: bool) -> bool:
    """Train on this many ranks; returns whether it reached the end."""
    if ranks == 1 and here:
        return train_here(config, log)
    from learner.ranks.launch import launch  # imports torch

    code = launch(ranks, ["--config", str(config.run.folder / "config.yaml")], UNFINISHED, "launcher.sft.rank")
    if code not in (0, UNFINISHED):
        raise EndedEarly(f"a rank ended with exit code {code}; the reason is on its stderr", code)
    return code == 0
