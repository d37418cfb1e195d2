"""Checkpoints: `<run folder>/checkpoints/step_<version>/`, whole or not there at all."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from common.checkpoints import checkpoints, versions
from common.config import Config
from common.durable import sync_folder
from common.errors import UserError
from common.log import get_logger
from common.model_folder import weights_fingerprint
from learner.checkpoint_files import (
    Damaged,
    Sums,
    compare,
    paths_in,
    read_metadata,
    sum_up,
    write_metadata,
)
from learner.data_only import loads_data_only
from learner.export import export_adapter, export_model
from learner.trainer import Trainer

TAG = "deepspeed"
# Written under this name and renamed when complete, so that a half-written one is never taken for a checkpoint.
UNFINISHED = ".unfinished"
# What a checkpoint is renamed to that cannot be continued from, for its user to look at.
SET_ASIDE = ".set-aside"


class Checkpoints:
    """The checkpoint folder of one run; all ranks call the same methods at the same time."""

    def __init__(self, config: Config, trainer: Trainer) -> None:
        self.folder = checkpoints(config.run.folder)
        self._config, self._trainer, self._world = config.learner, trainer, trainer.world
        self._model_path = config.model.path
        # A name of its own: a learner that was replaced while it saved may wake up, and write on.
        self._unfinished = self.folder / self._world.broadcast(f"{UNFINISHED}-{secrets.token_hex(4)}".encode()).decode()

    def versions(self) -> list[int]:
        """Versions of the complete checkpoints, ascending."""
        return versions(self.folder.parent)

    def previous(self, version: int) -> int:
        """The version to continue from if the checkpoint of this one turns out to be damaged; 0: the initial model.

        Where only one checkpoint is kept there is none, and that is this version.
        """
        older = [other for other in self.versions() if other < version]
        return version if self._config.keep_checkpoints == 1 else older[-1] if older else 0

    def save(self, version: int, confirm: Callable[[], object] = lambda: None) -> None:
        """Write a checkpoint (and its Hugging Face export), then remove the oldest beyond `keep_checkpoints`.

        Args:
            confirm: called on rank 0 before the checkpoint gets its name; what it raises leaves everything as it was.

        Raises:
            UserError: it cannot be written, for example because the disk is full; earlier ones are untouched.
        """
        target, unfinished = self.folder / f"step_{version}", self._unfinished
        try:
            self._make_room(unfinished)
            self._trainer.engine.save_checkpoint(
                str(unfinished), tag=TAG, save_latest=False, exclude_frozen_parameters=self._config.lora is not None
            )
            if self._config.lora is not None:
                export_adapter(self._trainer, unfinished / "adapter")
            if self._config.export:
                export_model(self._trainer, unfinished / "hf")
            self._world.barrier()
            sums = self._sum_up(unfinished)
            if self._world.is_main:
                write_metadata(unfinished, {"version": version, **self._layout(), "files": sums})
                confirm()
                self._put_in_place(unfinished, target)
        except BaseException as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            if not _is_of_the_disk(error):
                raise
            if self._world.is_main:
                confirm()  # it may be because another learner has cleared the folder
            # torch's archive writer does not say why it could not write.
            reason = "no space left" if isinstance(error, RuntimeError) else getattr(error, "strerror", None) or error
            raise UserError(
                f"cannot write checkpoint {target}: {reason}; earlier checkpoints are kept and nothing is lost: "
                "make room and start the learner again"
            ) from error
        self._world.barrier()

    def load(self, usable: Callable[[int], bool] = lambda version: True) -> int:
        """Continue from the newest checkpoint that is whole; returns its version, or 0 where there is none.

        One that is not is set aside with a warning, and the one before it is taken.

        Args:
            usable: asked on rank 0 for each version; one that is not is set aside too.

        Raises:
            UserError: it cannot be read, or was written by another number of ranks or another ZeRO stage.
        """
        if self._world.is_main:
            for left in self.folder.glob(f"{UNFINISHED}*"):  # by a save that was interrupted
                shutil.rmtree(left, ignore_errors=True)
        for version in reversed(json.loads(self._world.broadcast(json.dumps(self.versions()).encode()))):
            folder = self.folder / f"step_{version}"
            metadata, reason = self._examine(folder)
            if not reason and self._world.any_rank(self._world.is_main and not usable(version)):
                reason = "the tracker was not saved with it"
            if reason:
                self._set_aside(folder, reason)
            else:
                self._load(folder, metadata)
                return int(version)
        return 0

    def _load(self, folder: Path, metadata: dict[str, Any]) -> None:
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
        engine = self._trainer.engine
        try:
            with loads_data_only(engine):
                # The frozen weights, which are those of `model.path`, are not saved again.
                loaded, _ = engine.load_checkpoint(str(folder), tag=TAG, load_module_strict=self._config.lora is None)
        except Exception as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UserError(
                f"checkpoint {folder} cannot be read ({reason}); remove it to use an earlier one"
            ) from error
        if loaded is None:
            raise UserError(f"checkpoint {folder} is incomplete; remove it to use an earlier one")

    def _sum_up(self, folder: Path) -> Sums:
        """Bring all files to the disk, each rank a part of them; their sums."""
        own = sum_up(folder, paths_in(folder)[self._world.rank :: self._world.size])
        sums: Sums = {}
        for part in self._world.gather(json.dumps(own).encode()):
            sums |= json.loads(part)
        return sums

    def _examine(self, folder: Path) -> tuple[dict[str, Any], str]:
        """A checkpoint's metadata, and what is wrong with it or ''; each rank looks at a part of the files."""
        metadata, reason = {}, ""
        try:
            metadata = read_metadata(folder)
            # Checkpoints of older releases have no sums.
            sums: Sums = metadata.get("files", {})
            compare(folder, sums, sorted(sums)[self._world.rank :: self._world.size])
        except Damaged as error:
            reason = str(error)
        reasons = (other.decode() for other in self._world.gather(reason.encode()))
        return metadata, next((other for other in reasons if other), "")

    def _set_aside(self, folder: Path, reason: str) -> None:
        """Rename a checkpoint, so that it neither counts as one nor is removed."""

        def rename() -> None:
            aside = folder.with_name(folder.name + SET_ASIDE)
            number = 1
            while aside.exists():
                number += 1
                aside = folder.with_name(f"{folder.name}{SET_ASIDE}-{number}")
            get_logger().warning("checkpoint set aside, the one before it is taken", file=str(aside), reason=reason)
            try:
                folder.rename(aside)
            except OSError as error:
                raise UserError(
                    f"checkpoint {folder} cannot be used ({reason}) nor renamed: {error.strerror}"
                ) from None

        self._world.raise_on_all_ranks(rename if self._world.is_main else lambda: None)

    def _put_in_place(self, unfinished: Path, target: Path) -> None:
        """Give a complete checkpoint its name, and remove the oldest ones."""
        shutil.rmtree(target, ignore_errors=True)
        unfinished.rename(target)
        sync_folder(self.folder)
        for old in self.versions()[: -self._config.keep_checkpoints]:
            shutil.rmtree(self.folder / f"step_{old}", ignore_errors=True)

    def _layout(self) -> dict[str, Any]:
        """How the optimizer's state is divided; a checkpoint only fits the same."""
        config = self._config
        lora = None
        if config.lora is not None:
            # What decides over the adapter's parameters, and what it is added to, which is not saved with it.
            lora = config.lora.model_dump(mode="json", exclude={"serve"})
            lora["base"] = weights_fingerprint(self._model_path)
        return {"ranks": self._world.size, "zero_stage": config.zero_stage, "dtype": config.dtype, "lora": lora}

    def _make_room(self, unfinished: Path) -> None:
        """Make the folder to write into, and refuse on all ranks if the disk is too small."""
        problem = b""
        if self._world.is_main:
            self.folder.mkdir(parents=True, exist_ok=True)
            free, needed = shutil.disk_usage(self.folder).free, self._min_size()
            if free < needed:
                problem = f"{needed / 2**20:.1f} MiB are needed and {free / 2**20:.1f} MiB are free".encode()
            unfinished.mkdir()
        problem = self._world.broadcast(problem)
        if problem:
            raise OSError(problem.decode())

    def _min_size(self) -> int:
        """Bytes that a checkpoint takes at least: trained weights, two Adam moments in fp32, and the export."""
        parameters = list(self._trainer.policy.parameters())
        sizes = [getattr(parameter, "ds_numel", parameter.numel()) for parameter in parameters]
        trained = sum(size for size, parameter in zip(sizes, parameters, strict=True) if parameter.requires_grad)
        width = parameters[0].element_size()
        return trained * (8 + width) + (sum(sizes) * width if self._config.export else 0)


def _is_of_the_disk(error: BaseException) -> bool:
    """Whether a file could not be written."""
    if isinstance(error, RuntimeError):
        return type(error) is not RuntimeError or "inline_container" in str(error)
    return isinstance(error, (OSError, SafetensorError))
