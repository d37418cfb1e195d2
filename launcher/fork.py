"""`spo fork`: a new run that begins with what another one has learned."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Annotated

import typer

from common.config import Config, dump_config, load_config
from common.errors import UserError
from common.files import checkpoint, checkpoint_versions, tracker_is_whole, tracker_path
from common.process import keep_files_private
from common.scripts import OverrideOption


def fork(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run to begin with; it may be running.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="Folder of the new run, which is named like it.")],
    step: Annotated[
        int | None, typer.Option(min=1, help="Of the checkpoint to begin with; by default the newest one.")
    ] = None,
    override: OverrideOption = None,
) -> None:
    """Make a new run that goes on from a checkpoint of another: weights, optimizer, value tracker and step number.

    Everything may be changed in it, other data and another reward too. The first run stays as it is.

    - `spo fork runs/maths runs/maths-2 -o learner.lr=5e-7 -o run.steps=800`
    - `spo fork runs/maths runs/harder --step 200 -o data.train=harder.jsonl`
    """
    keep_files_private()
    config = forked_config(run, new, override or ())
    version = copy_checkpoint(run, new, step)
    if config.run.steps <= version:
        shutil.rmtree(new)
        raise UserError(
            f"run.steps = {config.run.steps}, and the checkpoint of {run} is of step {version} already: give the new "
            f"run more with -o run.steps={2 * version}"
        )
    origin = {"step": version, "key": "run", "from": str(run), "to": str(new), "time": round(time.time())}
    (new / "changes.jsonl").write_text(json.dumps(origin) + "\n", encoding="utf-8")
    (new / "config.yaml").write_text(dump_config(config, absolute=True), encoding="utf-8")
    typer.echo(f"{new} begins at step {version} of {run}; start it: spo run {new / 'config.yaml'} --resume")


def forked_config(run: Path, new: Path, overrides: list[str] | tuple[str, ...]) -> Config:
    """The new run's configuration: that of `run`, with the overrides, named like the folder `new`.

    Raises:
        UserError: `run` is no run folder, `new` is not empty or its name is none of a run; an override does not fit.
    """
    if not (run / "config.yaml").is_file():
        raise UserError(f"{run} is no run folder: it has no config.yaml")
    if new.exists() and any(new.iterdir()):
        raise UserError(f"{new} exists already; name a new folder")
    own = [f"run.name={new.name}", f"run.experiment={new.name}", f"run.output_dir={json.dumps(str(new.parent))}"]
    return load_config(run / "config.yaml", [*own, *overrides])


def copy_checkpoint(run: Path, new: Path, step: int | None) -> int:
    """Copy a checkpoint of the learner and the sampler's state beside it; returns their version.

    Files are linked where the file system can do it: nothing ever writes into a checkpoint.

    Raises:
        UserError: there is no such pair, or it cannot be copied.
    """
    pairs = [version for version in checkpoint_versions(run) if tracker_is_whole(tracker_path(run, version))]
    if not pairs:
        raise UserError(f"{run} has no checkpoint of learner and sampler to begin with")
    if step is not None and step not in pairs:
        raise UserError(f"{run} has no checkpoint of step {step}; it has {', '.join(map(str, pairs))}")
    version = pairs[-1] if step is None else step
    try:
        shutil.copytree(checkpoint(run, version), checkpoint(new, version), copy_function=_link)
        tracker_path(new, version).parent.mkdir(parents=True)
        _link(str(tracker_path(run, version)), str(tracker_path(new, version)))
    except (OSError, shutil.Error) as error:
        shutil.rmtree(new, ignore_errors=True)
        raise UserError(f"checkpoint {checkpoint(run, version)} cannot be copied to {new}: {error}") from None
    return version


def _link(source: str, target: str) -> str:
    try:
        os.link(source, target)
        return target
    except OSError:
        return str(shutil.copy2(source, target))
