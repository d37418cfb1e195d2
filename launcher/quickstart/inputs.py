"""The inputs of a quickstart run: its folder, model, problems and configuration."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from common.config import Config, load_config
from common.config.load import as_texts
from common.errors import UserError
from launcher.tasks import DEFAULT
from launcher.tasks.task import QuickstartTask, write


def run_name(task: QuickstartTask, number: int) -> str:
    """Name of a run and its folder: `quickstart-3`, or `quickstart-code-3` for a task other than the default."""
    return f"quickstart-{number}" if task.name == DEFAULT.name else f"quickstart-{task.name}-{number}"


def fresh_folder(output: Path, task: QuickstartTask = DEFAULT) -> Path:
    """Make a run folder with the first free number."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        number = 1
        while True:
            folder = output / run_name(task, number)
            try:
                folder.mkdir()
                return folder
            except FileExistsError:
                number += 1
    except OSError as error:
        raise UserError(f"cannot write the output folder {output}: {error.strerror}") from None


def write_inputs(
    folder: Path, model: Path, seed: int, formats: Sequence[str] = ("jsonl",), task: QuickstartTask = DEFAULT
) -> None:
    """Write the model and the problems, `train.jsonl` and `heldout.jsonl`, into a folder."""
    try:
        shutil.copytree(model, folder / "model", dirs_exist_ok=True)
        train, heldout = task.split(seed)
        for ending in formats:
            write(train, folder / f"train.{ending}")
            write(heldout, folder / f"heldout.{ending}")
    except OSError as error:
        # What `copytree` raises has no text of its own, but a list of the files with theirs.
        raise UserError(f"cannot write to {folder}: {error.strerror or error}") from None


def quickstart_config(
    folder: Path, seed: int, steps: int | None, overrides: Sequence[str] = (), task: QuickstartTask = DEFAULT
) -> Config:
    """The run's configuration: the task's template with the model and the problems in the run folder."""
    inputs = folder / "inputs"
    own: dict[str, str | int] = {
        "run.name": folder.name,
        "run.experiment": folder.name,
        "run.output_dir": str(folder.parent),
        "run.seed": seed,
        "model.path": str(inputs / "model"),
        "data.train": str(inputs / "train.jsonl"),
        "data.heldout": str(inputs / "heldout.jsonl"),
    }
    if steps is not None:
        own["run.steps"] = steps
    return load_config(task.template, [*as_texts(own), *overrides])
