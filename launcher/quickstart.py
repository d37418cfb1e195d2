"""The quickstart: a model, problems and a configuration of its own, then a run like any other."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from common.config import Config, load_config
from common.errors import UserError
from launcher import arithmetic
from launcher.warm_start_cache import Recipe, cache_folder, warm_start

TEMPLATE = Path(__file__).with_name("arithmetic.yaml")

Progress = Callable[[int, int, float], None]


def fresh_folder(output: Path) -> Path:
    """Make `quickstart-<n>` with the first number that is free."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1):
            folder = output / f"quickstart-{number}"
            try:
                folder.mkdir()
            except FileExistsError:
                continue
            return folder
    except OSError as error:
        raise UserError(f"cannot write the output folder {output}: {error.strerror}") from None
    raise AssertionError("numbers do not end")


def initial_model(progress: Progress | None = None) -> Path:
    """The warm-started model, made now or found in the cache."""
    return warm_start(Recipe(), cache_folder(), progress)


def write_inputs(folder: Path, model: Path, seed: int, formats: Sequence[str] = ("jsonl",)) -> None:
    """Put the model and the problems, `train.jsonl` and `heldout.jsonl`, into a folder."""
    try:
        shutil.copytree(model, folder / "model", dirs_exist_ok=True)
        train, heldout = arithmetic.split(seed)
        for ending in formats:
            arithmetic.write(train, folder / f"train.{ending}")
            arithmetic.write(heldout, folder / f"heldout.{ending}")
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}") from None


def quickstart_config(folder: Path, seed: int, steps: int | None, overrides: Sequence[str] = ()) -> Config:
    """The run's configuration: `configs/arithmetic.yaml` with the folder's own model and problems."""
    inputs = folder / "inputs"
    own = [
        f"run.name={folder.name}",
        f"run.experiment={folder.name}",
        f"run.output_dir={folder.parent}",
        f"run.seed={seed}",
        f"model.path={inputs / 'model'}",
        f"data.train={inputs / 'train.jsonl'}",
        f"data.heldout={inputs / 'heldout.jsonl'}",
    ]
    if steps is not None:
        own.append(f"run.steps={steps}")
    return load_config(TEMPLATE, [*own, *overrides])
