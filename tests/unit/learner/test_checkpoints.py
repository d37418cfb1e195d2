"""Checkpoints on a disk that fails: whole or not there, on the disk before they count, and never taken if damaged."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common.errors import UserError
from common.streams.lease import Replaced
from learner.checkpoint.checkpoint import Checkpoints
from learner.ranks.world import World
from tests.support.learner import learner_config

WEIGHTS, METADATA = "deepspeed/weights.pt", "checkpoint.json"


class FileEngine:
    """Writes its state as one file, and reads it back."""

    def __init__(self) -> None:
        self.state = ""
        self.may_write = threading.Event()
        self.may_write.set()
        self.checkpoint_engine = SimpleNamespace(load=None, save=self.write)
        self.module = SimpleNamespace(parameters=lambda: iter([torch.zeros(4, requires_grad=True)]))

    def write(self, state: dict[str, str], path: str) -> None:
        assert self.may_write.wait(600)
        Path(path).write_text(state["state"])

    def save_checkpoint(self, folder: str, tag: str, **_: Any) -> None:
        path = Path(folder) / tag / "weights.pt"
        path.parent.mkdir()
        self.checkpoint_engine.save({"state": self.state}, str(path))

    def load_checkpoint(self, folder: str, tag: str, **_: Any) -> tuple[str, None]:
        self.state = (Path(folder) / tag / "weights.pt").read_text()
        return folder, None


def checkpoints(
    folder: Path, path: str = "none", confirm: Callable[[], object] = lambda: None, **learner: Any
) -> tuple[Checkpoints, FileEngine]:
    engine = FileEngine()
    config = learner_config(path, folder, export=False, **learner)
    world = World(0, 1, torch.device("cpu"))
    trainer: Any = SimpleNamespace(engines=lambda: {"deepspeed": engine}, critic=None, world=world, config=config)
    return Checkpoints(config, trainer, None, confirm), engine


def saved(folder: Path, *versions: int, **learner: Any) -> Path:
    """A run with checkpoints of these versions; returns the folder they are in."""
    made, engine = checkpoints(folder, **learner)
    for version in versions:
        engine.state = f"weights of {version}"
        made.save(version)
    return made.folder


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(data)


def forget_sums(path: Path) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {"files": {WEIGHTS: 7}}))


DAMAGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a file cut short": (WEIGHTS, cut),
    "a flipped bit": (WEIGHTS, flip),
    "a file that is gone": (WEIGHTS, Path.unlink),
    "metadata cut short": (METADATA, cut),
    "metadata without sums": (METADATA, lambda path: path.write_text('{"version": 4}')),
    "sums that are none": (METADATA, forget_sums),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_skipped_for_the_one_before(tmp_path: Path, damage: str) -> None:
    folder, (file, act) = saved(tmp_path, 2, 4), DAMAGES[damage]
    act(folder / "step_4" / file)
    successor, engine = checkpoints(tmp_path)
    assert (successor.load(), engine.state) == (2, "weights of 2")
    assert names(folder) == {"step_2", "step_4.set-aside"}
    successor.save(4)
    assert successor.versions() == [2, 4], "what is saved next stands beside the one it was continued from"
    cut(folder / "step_4" / METADATA)
    assert checkpoints(tmp_path)[0].load() == 2
    assert names(folder) == {"step_2", "step_4.set-aside", "step_4.set-aside-2"}


def test_all_of_a_checkpoint_is_on_the_disk_before_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    sync, rename = os.fsync, Path.rename

    def note_sync(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        sync(descriptor)

    def note_rename(path: Path, target: Path) -> Path:
        assert {str(entry) for entry in (path, *path.rglob("*"))} <= set(synced)
        synced.clear()
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "rename", note_rename)
    folder = saved(tmp_path, 2)
    assert synced == [str(folder)], "and so is its name"


def test_a_checkpoint_is_what_training_was_when_it_began(tmp_path: Path) -> None:
    counted_before: list[int] = []

    def confirm() -> None:
        assert [path.read_text() for path in made.folder.rglob("weights.pt")] == ["weights of 2"]
        counted_before.extend(made.versions())

    made, engine = checkpoints(tmp_path, confirm=confirm)
    engine.may_write.clear()
    engine.state = "weights of 2"
    made.begin(2)
    engine.state = "weights of 3"
    assert (made.begun, made.is_written) == (2, False)
    engine.may_write.set()
    assert made.finish() == 2
    assert (made.begun, made.is_written, counted_before, made.versions()) == (None, True, [], [2])
    assert made.finish() is None
    successor, other = checkpoints(tmp_path)
    assert (successor.load(), other.state) == (2, "weights of 2")


def test_a_checkpoint_without_a_copy_is_written_at_once(tmp_path: Path) -> None:
    made, engine = checkpoints(tmp_path, checkpoint_in_background=False)
    engine.state = "weights of 2"
    made.begin(2)
    assert made.is_written
    assert [path.read_text() for path in made.folder.rglob("weights.pt")] == ["weights of 2"]
    made.finish()
    assert checkpoints(tmp_path)[0].load() == 2


REPLACED = Replaced("run 'test' has another learner now")


def full(descriptor: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("failure", [None, REPLACED], ids=repr)
def test_a_failed_save_leaves_everything_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException | None
) -> None:
    def confirm() -> None:
        if failure is not None:
            raise failure

    folder, (made, _) = saved(tmp_path, 2), checkpoints(tmp_path, confirm=confirm)
    with monkeypatch.context() as patch:
        if failure is None:
            patch.setattr(os, "fsync", full)
        words = "No space left on device; earlier checkpoints are kept" if failure is None else None
        with pytest.raises(UserError if failure is None else type(failure), match=words):
            made.save(3)
    assert names(folder) == {"step_2"}
    made, _ = checkpoints(tmp_path)
    made.save(4)
    assert made.versions() == [2, 4]


def test_a_learner_whose_files_were_cleared_says_it_was_replaced(tmp_path: Path) -> None:
    def confirm() -> None:
        raise REPLACED

    folder, (made, engine) = saved(tmp_path, 2), checkpoints(tmp_path, confirm=confirm)
    write = engine.write

    def cleared_meanwhile(state: dict[str, str], path: str) -> None:
        write(state, path)
        assert checkpoints(tmp_path)[0].load() == 2

    engine.checkpoint_engine.save = cleared_meanwhile
    with pytest.raises(Replaced, match="has another learner now"):
        made.save(3)
    assert names(folder) == {"step_2"}


@pytest.mark.parametrize(("keep", "previous"), [(1, [2, 4, 6]), (2, [0, 2, 4])])
def test_batches_are_kept_from_the_checkpoint_before_the_newest(tmp_path, keep, previous) -> None:
    made, _ = checkpoints(tmp_path, keep_checkpoints=keep)
    needed_from = []
    for version in (2, 4, 6):
        made.save(version)
        needed_from.append(made.previous(version))
    assert needed_from == previous
    assert made.versions() == [2, 4, 6][-keep:]


def test_only_an_adapter_of_the_same_shape_and_base_is_continued(tmp_path, monkeypatch):
    monkeypatch.setattr("learner.checkpoint.checkpoint.export_adapter", lambda trainer, folder: lambda: None)
    saved(tmp_path, 1, lora={"rank": 8})
    assert checkpoints(tmp_path, lora={"rank": 8, "serve": "merged"})[0].load() == 1
    for other in ({"rank": 4}, {"rank": 8, "targets": ["q_proj"]}, None):
        with pytest.raises(UserError, match=r"was written with lora = \{'rank': 8.*begin a new run"):
            checkpoints(tmp_path, lora=other)[0].load()
    with pytest.raises(UserError, match=r"'base': 'none'.*'base': 'other'"):
        checkpoints(tmp_path, path="other", lora={"rank": 8})[0].load()
