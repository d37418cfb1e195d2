"""Checkpoints: `<run folder>/checkpoints/step_<version>/`, whole or not there at all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from common.config import Config
from common.errors import UserError
from learner.export import export_model
from learner.trainer import Trainer

TAG = "deepspeed"
METADATA = "checkpoint.json"
# Written under this name and renamed when complete, so that a half-written one is never taken for a checkpoint.
UNFINISHED = ".unfinished"


class Checkpoints:
    """The checkpoint folder of one run; all ranks call the same methods at the same time."""

    def __init__(self, config: Config, trainer: Trainer) -> None:
        self.folder = config.run.folder / "checkpoints"
        self._config, self._trainer, self._world = config.learner, trainer, trainer.world

    def versions(self) -> list[int]:
        """Versions of the complete checkpoints, ascending."""
        names = (path.parent.name for path in self.folder.glob(f"step_*/{METADATA}"))
        return sorted(int(name[len("step_") :]) for name in names if name[len("step_") :].isdigit())

    def save(self, version: int) -> None:
        """Write a checkpoint (and its Hugging Face export), then remove the oldest beyond `keep_checkpoints`.

        Raises:
            UserError: it cannot be written, for example because the disk is full; earlier ones are untouched.
        """
        target, unfinished = self.folder / f"step_{version}", self.folder / UNFINISHED
        try:
            self._make_room(unfinished)
            self._trainer.engine.save_checkpoint(str(unfinished), tag=TAG, save_latest=False)
            if self._config.export:
                export_model(self._trainer, unfinished / "hf")
            self._world.barrier()
            if self._world.is_main:
                (unfinished / METADATA).write_text(json.dumps({"version": version, **self._layout()}), encoding="utf-8")
                shutil.rmtree(target, ignore_errors=True)
                unfinished.rename(target)
                for old in self.versions()[: -self._config.keep_checkpoints]:
                    shutil.rmtree(self.folder / f"step_{old}", ignore_errors=True)
        except (OSError, RuntimeError, SafetensorError) as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            if type(error) is RuntimeError and "inline_container" not in str(error):
                raise
            # torch's archive writer does not say why it could not write.
            reason = "no space left" if isinstance(error, RuntimeError) else getattr(error, "strerror", None) or error
            raise UserError(
                f"cannot write checkpoint {target}: {reason}; earlier checkpoints are kept and nothing is lost: "
                "make room and start the learner again"
            ) from error
        self._world.barrier()

    def load(self) -> int:
        """Continue from the newest complete checkpoint; returns its version, or 0 where there is none.

        Raises:
            UserError: it cannot be read, or was written by another number of ranks or another ZeRO stage.
        """
        newest = int(self._world.broadcast(str((self.versions() or [0])[-1]).encode()))
        if newest == 0:
            return 0
        folder = self.folder / f"step_{newest}"
        metadata: dict[str, Any] = json.loads((folder / METADATA).read_text(encoding="utf-8"))
        differing = [
            f"{key} = {metadata.get(key)!r} (here {value!r})"
            for key, value in self._layout().items()
            if metadata.get(key) != value
        ]
        if differing:
            raise UserError(
                f"checkpoint {folder} was written with {', '.join(differing)}; start the learner like that, or begin a "
                f"new run with model.path={folder / 'hf'}"
            )
        try:
            loaded, _ = self._trainer.engine.load_checkpoint(str(folder), tag=TAG)
        except Exception as error:
            raise UserError(f"checkpoint {folder} cannot be read ({error}); remove it to use an earlier one") from error
        if loaded is None:
            raise UserError(f"checkpoint {folder} is incomplete; remove it to use an earlier one")
        return newest

    def _layout(self) -> dict[str, Any]:
        """How the optimizer's state is divided; a checkpoint only fits the same."""
        return {"ranks": self._world.size, "zero_stage": self._config.zero_stage, "dtype": self._config.dtype}

    def _make_room(self, unfinished: Path) -> None:
        """Clear what an interrupted save has left, and refuse on all ranks if the disk is too small."""
        problem = b""
        if self._world.is_main:
            self.folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(unfinished, ignore_errors=True)
            free, needed = shutil.disk_usage(self.folder).free, self._min_size()
            if free < needed:
                problem = f"{needed / 2**20:.1f} MiB are needed and {free / 2**20:.1f} MiB are free".encode()
            unfinished.mkdir()
        problem = self._world.broadcast(problem)
        if problem:
            raise OSError(problem.decode())

    def _min_size(self) -> int:
        """Bytes that a checkpoint takes at least: weights, two Adam moments in fp32, and the export."""
        parameters = list(self._trainer.policy.parameters())
        count = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in parameters)
        width = parameters[0].element_size()
        return count * (8 + width * (2 if self._config.export else 1))
