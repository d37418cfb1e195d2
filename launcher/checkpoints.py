"""The commands that take a checkpoint out of a run: `spo fork` for a new run, `spo export` for everything else."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Annotated

import typer

from common.config import dump_config, load_config
from common.config.load import as_texts
from common.errors import UserError
from common.files import best_version, checkpoint, checkpoint_versions, tracker_is_whole, tracker_path
from common.process import keep_files_private
from common.scripts import OverrideOption
from launcher.model_card import CARD, held_out, model_card
from launcher.model_card import push as push_model

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run; it may be running.")]
Step = Annotated[int | None, typer.Option(min=1, help="Step of the checkpoint; by default the newest.")]


def fork(
    run: RunFolder,
    new: Annotated[Path, typer.Argument(metavar="NEW", help="Folder of the new run; its name is the run's name.")],
    step: Step = None,
    override: OverrideOption = None,
) -> None:
    """Make a new run that starts from a checkpoint of another: weights, optimizer, value tracker and step number.

    Any setting of the new run may differ, even data and reward. The other run is not changed.

    - `spo fork runs/maths runs/maths-2 -o learner.lr=5e-7 -o run.steps=800`
    - `spo fork runs/maths runs/harder --step 200 -o data.train=harder.jsonl`
    """
    keep_files_private()
    _check_folders(run, new)
    own = {"run.name": new.name, "run.experiment": new.name, "run.output_dir": str(new.parent)}
    config = load_config(run / "config.yaml", [*as_texts(own), *(override or ())])
    pairs = [version for version in checkpoint_versions(run) if tracker_is_whole(tracker_path(run, version))]
    version = _chosen(run, pairs, step, "of both learner and sampler to start from")
    if config.run.steps <= version:
        raise UserError(
            f"run.steps = {config.run.steps}, but the checkpoint of {run} is already at step {version}: give the new "
            f"run more steps with -o run.steps={2 * version}"
        )
    try:
        # Linked files are safe: nothing ever writes into a checkpoint.
        shutil.copytree(checkpoint(run, version), checkpoint(new, version), copy_function=_link)
        tracker_path(new, version).parent.mkdir(parents=True)
        _link(str(tracker_path(run, version)), str(tracker_path(new, version)))
    except (OSError, shutil.Error) as error:
        shutil.rmtree(new, ignore_errors=True)
        raise UserError(f"checkpoint {checkpoint(run, version)} cannot be copied to {new}: {error}") from None
    origin = {"step": version, "key": "run", "from": str(run), "to": str(new), "time": round(time.time())}
    (new / "changes.jsonl").write_text(json.dumps(origin) + "\n", encoding="utf-8")
    (new / "config.yaml").write_text(dump_config(config, absolute=True), encoding="utf-8")
    newest = checkpoint_versions(run)[-1]
    why = ""
    if step is None and version < newest:
        state = tracker_path(run, newest)
        lack = "damaged" if state.exists() else "missing: the sampler had not written it yet"
        why = f", since {state.relative_to(run)} of its newest step, {newest}, is {lack}"
    typer.echo(f"{new} starts from step {version} of {run}{why}; start it: spo run {new / 'config.yaml'} --resume")


def export(
    run: RunFolder,
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="Folder for the model.")],
    step: Step = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Write only the adapter, for peft; needs a run with learner.lora.")
    ] = False,
    best: Annotated[
        bool, typer.Option("--best", help="The checkpoint with the highest held-out reward, instead of the newest.")
    ] = False,
    card: Annotated[
        bool, typer.Option("--card", help="Also write a model card, README.md, with the run's figures.")
    ] = False,
    push: Annotated[
        str | None,
        typer.Option("--push", metavar="OWNER/NAME", help="Upload the model, with its card, to the Hugging Face hub."),
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="With --push, a new model is public, not private.")] = False,
) -> None:
    """Write the model of a checkpoint in the format that transformers and vLLM read.

    It works even if `learner.export` is off, and for a checkpoint of any number of ranks; checksums are verified. An
    adapter is merged into the weights.

    - `spo export runs/maths maths-model`
    - `spo export runs/maths maths-200 --step 200`
    - `spo export runs/maths maths-best --best --push me/maths`
    """
    version = write_export(run, output, step, best=best, adapter=adapter, card=card or push is not None)
    typer.echo(f"{output} has the {'adapter' if adapter else 'model'} of step {version} of {run}")
    if push is not None:
        typer.echo(f"uploaded to {push_model(output, push, public)}")


def write_export(
    run: Path,
    output: Path,
    step: int | None = None,
    *,
    best: bool = False,
    adapter: bool = False,
    card: bool = False,
) -> int:
    """Export a checkpoint, by default the newest; returns its step. See `spo.export`."""
    _check_folders(run, output)
    if best and step is not None:
        raise UserError(f"--best and --step {step} each name a checkpoint; give one of them")
    versions = checkpoint_versions(run)
    version = _best(run, versions) if best and versions else _chosen(run, versions, step, "to export")
    folder = checkpoint(run, version)
    if adapter:
        if not (folder / "adapter").is_dir():
            raise UserError(f"{run} has no adapter: it trained all weights (learner.lora was not set)")
        try:
            shutil.copytree(folder / "adapter", output, dirs_exist_ok=True)
        except (OSError, shutil.Error) as error:
            raise UserError(f"{output} cannot be written: {getattr(error, 'strerror', None) or error}") from None
    else:
        from learner.checkpoint.export import export_checkpoint  # imports torch and DeepSpeed

        export_checkpoint(load_config(run / "config.yaml"), folder, output)
    if card:
        (output / CARD).write_text(model_card(load_config(run / "config.yaml"), run, version), encoding="utf-8")
    return version


def _best(run: Path, versions: list[int]) -> int:
    version = best_version(versions, held_out(run))
    if version is None:
        raise UserError(
            f"--best: no version with a checkpoint in {run} was evaluated; its checkpoints are of steps "
            f"{', '.join(map(str, versions))}: give --step"
        )
    return version


def _check_folders(run: Path, new: Path) -> None:
    if not (run / "config.yaml").is_file():
        raise UserError(f"{run} is not a run folder: it has no config.yaml")
    if new.exists() and (not new.is_dir() or any(new.iterdir())):
        raise UserError(f"{new} exists already; name a new folder")


def _chosen(run: Path, steps: list[int], step: int | None, purpose: str) -> int:
    if not steps:
        raise UserError(f"{run} has no checkpoint {purpose}")
    if step is not None and step not in steps:
        raise UserError(f"{run} has no checkpoint of step {step}; it has {', '.join(map(str, steps))}")
    return steps[-1] if step is None else step


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
