"""Checkpoints: `<run folder>/checkpoints/step_<version>/`, each either complete or absent."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from common.config import Config
from common.errors import UserError
from common.files import best_version, checkpoint_versions, checkpoints, sync_folder
from common.log import Timeline, get_logger
from learner.checkpoint.export import export_adapter, export_critic, export_model
from learner.checkpoint.files import (
    Damaged,
    Sums,
    compare,
    contents,
    differing,
    division,
    is_undivided,
    min_size,
    paths_in,
    read_metadata,
    sum_up,
    write_metadata,
)
from learner.checkpoint.plain_data import writes_later
from learner.checkpoint.resume import has_frozen, load_own, load_redivided
from learner.trainer import Trainer

# Written under this name and renamed when complete, so that a half-written one is never taken for a checkpoint.
UNFINISHED = ".unfinished"
# A checkpoint that cannot be continued from is renamed with this suffix, and kept for inspection.
SET_ASIDE = ".set-aside"


@dataclass(frozen=True, slots=True)
class Writing:
    """A checkpoint whose files this rank is writing."""

    version: int
    files: Future[Sums]


class Checkpoints:
    """The checkpoint folder of one run; all ranks call the same methods at the same time."""

    def __init__(
        self,
        config: Config,
        trainer: Trainer,
        timeline: Timeline | None = None,
        confirm: Callable[[], object] = lambda: None,
        rewards: Callable[[], Mapping[int, float]] = dict,
    ) -> None:
        """Nothing is read or written yet.

        Args:
            confirm: called on rank 0 before a checkpoint gets its name; an error in it leaves everything unchanged.
            rewards: called on rank 0 for the mean held-out reward of each version evaluated so far.
        """
        self.folder = checkpoints(config.run.folder)
        self._timeline = timeline or Timeline(None, "")
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Writing | None = None
        self._config, self._trainer, self._world, self._confirm = config, trainer, trainer.world, confirm
        self._rewards = rewards
        # Each learner has its own folder, because one that was replaced while it saved may resume writing later.
        self._unfinished = self.folder / self._world.broadcast(f"{UNFINISHED}-{secrets.token_hex(4)}".encode()).decode()

    def versions(self) -> list[int]:
        """Versions of the complete checkpoints, ascending."""
        return checkpoint_versions(self.folder.parent)

    def previous(self, version: int) -> int:
        """The version to continue from if the checkpoint of this one turns out to be damaged; 0: the initial model.

        If only one checkpoint is kept, there is no earlier one to continue from, and the result is this version.
        """
        older = [other for other in self.versions() if other < version]
        return version if self._config.learner.keep_checkpoints == 1 else older[-1] if older else 0

    @property
    def is_written(self) -> bool:
        """Whether this rank has nothing left to write."""
        return self._writing is None or self._writing.files.done()

    @property
    def begun(self) -> int | None:
        """The version of the unfinished checkpoint; None if there is none."""
        return None if self._writing is None else self._writing.version

    def save(self, version: int) -> None:
        """Write a checkpoint and wait for it; see `begin` and `finish`."""
        self.begin(version)
        self.finish()

    def begin(self, version: int) -> None:
        """Copy a checkpoint to host memory, and begin to write it (and its Hugging Face export) in a thread.

        With `learner.checkpoint_in_background` off it is written at once, without a copy.

        Raises:
            UserError: it cannot be written, for example because the disk is full; earlier ones are untouched.
        """
        assert self._writing is None, "one at a time"
        learner, unfinished = self._config.learner, self._unfinished
        exports = {}
        try:
            self._make_room(unfinished)
            files: dict[Path, Callable[[], None]] = {}
            for tag, engine in self._trainer.engines().items():
                with writes_later(engine, learner.checkpoint_in_background) as written:
                    engine.save_checkpoint(
                        str(unfinished), tag=tag, save_latest=False, exclude_frozen_parameters=has_frozen(engine)
                    )
                files |= written
            if learner.lora is not None:
                exports[unfinished / "adapter"] = export_adapter(self._trainer, unfinished / "adapter")
            if learner.export:
                exports[unfinished / "hf"] = export_model(self._trainer, unfinished / "hf")
                if self._trainer.critic is not None:
                    exports[unfinished / "critic"] = export_critic(self._trainer, unfinished / "critic")
        except BaseException as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            self._raise_disk_error(version, error)
            raise
        if self._world.is_main:
            files |= exports
        self._writing = Writing(version, self._thread.submit(self._write, version, files))
        # Only wait: `finish` raises an error of one rank on all of them.
        if not learner.checkpoint_in_background:
            wait([self._writing.files])

    def finish(self) -> None:
        """Wait until all ranks have written the checkpoint, if one was begun, and give it its name: now it counts.

        The oldest beyond `keep_checkpoints` are removed, except the best.

        Raises:
            UserError: on all ranks; it could not be written, and earlier ones are untouched.
        """
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        try:
            sums = self._world.raise_on_all_ranks(lambda: self._sums(writing))
            for part in self._world.gather(json.dumps(sums).encode()):
                sums |= json.loads(part)
            if self._world.is_main:
                self._complete(writing.version, sums)
        except BaseException as error:
            shutil.rmtree(self._unfinished, ignore_errors=True)
            self._raise_disk_error(writing.version, error)
            raise
        self._world.barrier()

    def _write(self, version: int, files: dict[Path, Callable[[], None]]) -> Sums:
        """Write this rank's files to the disk, in the thread; returns their checksums."""
        sums: Sums = {}
        with self._timeline.span("write", lane="checkpoint", version=version):
            for path in list(files):
                files.pop(path)()  # what was written is not kept in memory
                written = [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]
                sums |= sum_up(self._unfinished, [str(one.relative_to(self._unfinished)) for one in written])
        return sums

    def _sums(self, writing: Writing) -> Sums:
        try:
            return writing.files.result()
        except BaseException as error:
            self._raise_disk_error(writing.version, error)
            raise

    def _complete(self, version: int, sums: Sums) -> None:
        """Add the checksums of DeepSpeed's other files and the metadata, and move the checkpoint into place."""
        unfinished = self._unfinished
        sums |= sum_up(unfinished, [path for path in paths_in(unfinished) if path not in sums])
        own = division(self._config, self._world) | contents(self._config)
        write_metadata(unfinished, {"version": version, **own, "files": sums})
        self._confirm()
        target = self.folder / f"step_{version}"
        shutil.rmtree(target, ignore_errors=True)
        unfinished.rename(target)
        sync_folder(self.folder)
        old_versions = self.versions()[: -self._config.learner.keep_checkpoints]
        best = (
            best_version(self.versions(), self._rewards()) if old_versions and self._config.learner.keep_best else None
        )
        for old in (one for one in old_versions if one != best):
            shutil.rmtree(self.folder / f"step_{old}", ignore_errors=True)

    def _raise_disk_error(self, version: int, error: BaseException) -> None:
        """Raise a `UserError` if the error means that a file could not be written."""
        # torch's archive writer raises a RuntimeError that does not name the reason; the usual one is a full disk.
        is_of_torch = isinstance(error, RuntimeError) and "inline_container" in str(error)
        if not (is_of_torch or isinstance(error, (OSError, SafetensorError))):
            return
        if self._world.is_main:
            self._confirm()  # another learner may have cleared the folder
        reason = "no space left" if is_of_torch else getattr(error, "strerror", None) or error
        raise UserError(
            f"cannot write checkpoint {self.folder / f'step_{version}'}: {reason}; earlier checkpoints are kept and "
            "nothing is lost: make room and start the learner again"
        ) from error

    def load(self, usable: Callable[[int], bool] = lambda version: True) -> int:
        """Continue from the newest complete checkpoint; returns its version, or 0 if there is none.

        A damaged one is renamed with a warning, and the one before it is used.

        Args:
            usable: called on rank 0 with each version; a checkpoint for which it is false is renamed too.

        Raises:
            UserError: the checkpoint cannot be read, or has other tensors than this run trains.
        """
        if self._world.is_main:
            for leftover in self.folder.glob(f"{UNFINISHED}*"):  # of an interrupted save
                shutil.rmtree(leftover, ignore_errors=True)
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
        if difference := differing(contents(self._config), metadata):
            raise UserError(
                f"checkpoint {folder} was written with {difference}; start the learner with its values, or begin a "
                f"new run with model.path={folder / 'hf'}"
            )
        difference = differing(division(self._config, self._world), metadata)
        if difference and not is_undivided(self._config, metadata):
            load_redivided(self._trainer, folder, difference)
        else:
            load_own(self._trainer, folder)

    def _examine(self, folder: Path) -> tuple[dict[str, Any], str]:
        """A checkpoint's metadata, and what is wrong with it, or ''; each rank checks a part of the files."""
        metadata, reason = {}, ""
        try:
            metadata = read_metadata(folder)
            sums: Sums = metadata["files"]
            compare(folder, sums, sorted(sums)[self._world.rank :: self._world.size])
        except Damaged as error:
            reason = str(error)
        reasons = (other.decode() for other in self._world.gather(reason.encode()))
        return metadata, next((other for other in reasons if other), "")

    def _set_aside(self, folder: Path, reason: str) -> None:
        """Rename a checkpoint, so that it is neither used nor removed."""

        def rename() -> None:
            aside = folder.with_name(folder.name + SET_ASIDE)
            number = 1
            while aside.exists():
                number += 1
                aside = folder.with_name(f"{folder.name}{SET_ASIDE}-{number}")
            get_logger().warning("checkpoint skipped, the one before it is used", file=str(aside), reason=reason)
            try:
                folder.rename(aside)
            except OSError as error:
                raise UserError(
                    f"checkpoint {folder} can be neither used ({reason}) nor renamed: {error.strerror}"
                ) from None

        self._world.raise_on_all_ranks(rename if self._world.is_main else lambda: None)

    def _make_room(self, unfinished: Path) -> None:
        """Make the folder to write into, and refuse on all ranks if the disk is too small."""
        problem = b""
        if self._world.is_main:
            modules = [engine.module for engine in self._trainer.engines().values()]
            needed = sum(min_size(module.parameters(), self._config.learner.export) for module in modules)
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                free = shutil.disk_usage(self.folder).free
                if free < needed:
                    problem = f"{needed / 2**20:.1f} MiB are needed and {free / 2**20:.1f} MiB are free".encode()
                unfinished.mkdir()
            except OSError as error:  # the other ranks wait for the answer
                problem = str(error).encode()
        problem = self._world.broadcast(problem)
        if problem:
            raise OSError(problem.decode())
