"""`spo export`: the model of a checkpoint as an ordinary folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from common.config import load_config
from common.errors import UserError
from common.files import checkpoint, checkpoint_versions


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run; it may be running.")],
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="Folder for the model.")],
    step: Annotated[int | None, typer.Option(min=1, help="Of the checkpoint; by default the newest one.")] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="The adapter alone, for peft, of a run with learner.lora.")
    ] = False,
) -> None:
    """Write the model of a checkpoint as transformers, vLLM and everything else read it.

    Also where `learner.export` is off, and whatever number of ranks wrote the checkpoint; checksums are verified. An
    adapter is added to the weights.

    - `spo export runs/maths maths-model`
    - `spo export runs/maths maths-200 --step 200`
    """
    if not (run / "config.yaml").is_file():
        raise UserError(f"{run} is no run folder: it has no config.yaml")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"{output} exists already; name a new folder")
    steps = checkpoint_versions(run)
    if not steps:
        raise UserError(f"{run} has no checkpoint to export")
    if step is not None and step not in steps:
        raise UserError(f"{run} has no checkpoint of step {step}; it has {', '.join(map(str, steps))}")
    version = steps[-1] if step is None else step
    folder = checkpoint(run, version)
    if adapter:
        if not (folder / "adapter").is_dir():
            raise UserError(f"{run} has no adapter: it trained all weights (learner.lora was not set)")
        try:
            shutil.copytree(folder / "adapter", output, dirs_exist_ok=True)
        except (OSError, shutil.Error) as error:
            raise UserError(f"{output} cannot be written: {getattr(error, 'strerror', None) or error}") from None
    else:
        from learner.export import export_checkpoint  # imports torch and DeepSpeed

        export_checkpoint(load_config(run / "config.yaml"), folder, output)
    typer.echo(f"{output} has the {'adapter' if adapter else 'model'} of step {version} of {run}")
