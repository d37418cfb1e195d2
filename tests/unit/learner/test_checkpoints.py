"""Checkpoints on a disk that fails, and what their files hold: never taken if damaged, and never code."""

from __future__ import annotations

import errno
import json
import math
import os
import pickletools
import threading
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import DistBackendError

from common.errors import UserError
from common.streams.lease import Replaced
from learner.checkpoint.checkpoint import Checkpoints
from learner.checkpoint.plain_data import host_copy, plain, read, reads_plain_data
from tests.support.learner import ALONE, Call, learner_config

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
    folder: Path,
    path: str = "none",
    confirm: Callable[[], object] = lambda: None,
    rewards: Callable[[], dict[int, float]] = dict,
    **learner: Any,
) -> tuple[Checkpoints, FileEngine]:
    engine = FileEngine()
    config = learner_config(path, folder, export=False, **learner)
    trainer: Any = SimpleNamespace(engines=lambda: {"deepspeed": engine}, critic=None, world=ALONE, config=config)
    return Checkpoints(config, trainer, None, confirm, rewards), engine


def saved(folder: Path, *versions: int, **learner: Any) -> Path:
    """A run with checkpoints of these versions; returns the folder they are in."""
    made, engine = checkpoints(folder, **learner)
    for version in versions:
        engine.state = f"weights of {version}"
        made.save(version)
    return made.folder


def continued(folder: Path) -> tuple[int, str]:
    """The version that a new learner goes on from, and the state that it has then."""
    successor, engine = checkpoints(folder)
    return successor.load(), engine.state


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
def test_a_damaged_checkpoint_is_skipped_for_the_one_before(tmp_path, damage):
    folder, (file, act) = saved(tmp_path, 2, 4), DAMAGES[damage]
    act(folder / "step_4" / file)
    successor, engine = checkpoints(tmp_path)
    assert (successor.load(), engine.state) == (2, "weights of 2")
    assert names(folder) == {"step_2", "step_4.set-aside"}
    successor.save(4)
    assert successor.versions() == [2, 4], "what is saved next stands beside the one it was continued from"
    cut(folder / "step_4" / METADATA)
    assert continued(tmp_path)[0] == 2
    assert names(folder) == {"step_2", "step_4.set-aside", "step_4.set-aside-2"}


def test_all_of_a_checkpoint_is_on_the_disk_before_it_counts(tmp_path, monkeypatch):
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


def test_a_checkpoint_is_what_training_was_when_it_began(tmp_path):
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
    made.finish()
    assert (made.begun, made.is_written, counted_before, made.versions()) == (None, True, [], [2])
    made.finish()
    assert continued(tmp_path) == (2, "weights of 2")


def test_a_checkpoint_without_a_copy_is_written_at_once(tmp_path):
    made, engine = checkpoints(tmp_path, checkpoint_in_background=False)
    engine.state = "weights of 2"
    made.begin(2)
    assert made.is_written
    assert [path.read_text() for path in made.folder.rglob("weights.pt")] == ["weights of 2"]
    made.finish()
    assert continued(tmp_path)[0] == 2


def replaced() -> None:
    raise Replaced("run 'test' has another learner now")


def full(descriptor: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("is_full", [True, False], ids=["full disk", "replaced"])
def test_a_failed_save_leaves_everything_as_it_was(tmp_path, monkeypatch, is_full):
    folder, (made, _) = saved(tmp_path, 2), checkpoints(tmp_path, confirm=replaced)
    error, words = Replaced, "has another learner now"
    if is_full:
        made, _ = checkpoints(tmp_path)
        error, words = UserError, "No space left on device; earlier checkpoints are kept"
    with monkeypatch.context() as patch:
        if is_full:
            patch.setattr(os, "fsync", full)
        with pytest.raises(error, match=words):
            made.save(3)
    assert names(folder) == {"step_2"}
    made, _ = checkpoints(tmp_path)
    if is_full:
        with monkeypatch.context() as patch:
            patch.setattr(Path, "mkdir", lambda *_, **__: full(0))
            with pytest.raises(error, match=words):
                made.save(3)
    made.save(4)
    assert made.versions() == [2, 4]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), DistBackendError("NCCL error")])
def test_an_error_that_the_disk_has_no_part_in_stays_what_it_is(tmp_path, monkeypatch, error):
    folder, (made, engine) = saved(tmp_path, 2), checkpoints(tmp_path)

    def fails(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(engine, "save_checkpoint", fails)
    with pytest.raises(type(error)):
        made.save(3)
    assert names(folder) == {"step_2"}


def test_a_learner_whose_files_were_cleared_says_it_was_replaced(tmp_path):
    folder, (made, engine) = saved(tmp_path, 2), checkpoints(tmp_path, confirm=replaced)

    def cleared_meanwhile(state: dict[str, str], path: str) -> None:
        engine.write(state, path)
        assert continued(tmp_path)[0] == 2

    engine.checkpoint_engine.save = cleared_meanwhile
    with pytest.raises(Replaced, match="has another learner now"):
        made.save(3)
    assert names(folder) == {"step_2"}


@pytest.mark.parametrize(("keep", "previous"), [(1, [2, 4, 6]), (2, [0, 2, 4])])
def test_batches_are_kept_from_the_checkpoint_before_the_newest(tmp_path, keep, previous):
    made, _ = checkpoints(tmp_path, keep_checkpoints=keep)
    needed_from = []
    for version in (2, 4, 6):
        made.save(version)
        needed_from.append(made.previous(version))
    assert needed_from == previous
    assert made.versions() == [2, 4, 6][-keep:]


@pytest.mark.parametrize(
    ("rewards", "keep_best", "kept"),
    [
        ({0: 0.9, 2: 0.5, 4: 0.6, 7: 0.8}, True, [4, 8, 10]),
        ({2: 0.6, 4: 0.6}, True, [4, 8, 10]),
        ({4: 0.5, 10: 0.6}, True, [8, 10]),
        ({2: math.nan, 4: 0.5, 6: math.nan}, True, [4, 8, 10]),
        ({}, True, [8, 10]),
        ({4: 0.5}, False, [8, 10]),
    ],
)
def test_the_best_evaluated_checkpoint_is_kept_beside_the_newest(tmp_path, rewards, keep_best, kept):
    told: dict[int, float] = {}
    made, _ = checkpoints(tmp_path, keep_checkpoints=2, keep_best=keep_best, rewards=lambda: told)
    for version in (2, 4, 6, 8, 10):
        told |= {evaluated: reward for evaluated, reward in rewards.items() if evaluated <= version}
        made.save(version)
    assert made.versions() == kept


def test_only_an_adapter_of_the_same_shape_and_base_is_continued(tmp_path, monkeypatch):
    monkeypatch.setattr("learner.checkpoint.checkpoint.export_adapter", lambda trainer, folder: lambda: None)
    saved(tmp_path, 1, lora={"rank": 8})
    assert checkpoints(tmp_path, lora={"rank": 8, "serve": "merged"})[0].load() == 1
    for other in ({"rank": 4}, {"rank": 8, "targets": ["q_proj"]}, None):
        with pytest.raises(UserError, match=r"was written with lora = \{'rank': 8.*begin a new run"):
            checkpoints(tmp_path, lora=other)[0].load()
    with pytest.raises(UserError, match=r"'base': 'none'.*'base': 'other'"):
        checkpoints(tmp_path, path="other", lora={"rank": 8})[0].load()


PLAIN = {
    "zero_stage": 3,
    "loss_scaler": {"cur_scale": 1.0, "dynamic": False},
    "param_slice_mappings": [OrderedDict(weight={"numel": 4, "start": 2})],
    "shape": torch.Size([2, 2]),
}


def of_deepspeed(**changes: Any) -> dict[str, Any]:
    """The same in classes of DeepSpeed, which is imported where it is used."""
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.utils.tensor_fragment import fragment_address

    slices = [OrderedDict(weight=fragment_address(numel=4, start=2))]
    own = {"zero_stage": stages().weights, "loss_scaler": LossScaler(1.0), "param_slice_mappings": slices}
    return PLAIN | own | changes


def stages() -> Any:
    from deepspeed.runtime.zero.config import ZeroStageEnum

    return ZeroStageEnum


STATES: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": lambda: PLAIN,
    "by value, as Python 3.11.7 wrote it": lambda: of_deepspeed(zero_stage=Call(stages(), 3)),
    "by name, as Python 3.11.2 wrote it": lambda: of_deepspeed(zero_stage=Call(getattr, stages(), "weights")),
}


@pytest.mark.parametrize("kind", STATES)
def test_files_of_every_python_are_read(tmp_path, kind):
    path, scaler = tmp_path / "state.pt", of_deepspeed()["loss_scaler"]
    torch.save({"optimizer_state_dict": STATES[kind]()}, path)
    assert read(path) == {"optimizer_state_dict": PLAIN}
    loads, optimizer = SimpleNamespace(load=None), SimpleNamespace(loss_scaler=scaler)
    with reads_plain_data(SimpleNamespace(checkpoint_engine=loads, optimizer=optimizer)):
        state = loads.load(str(path))
    assert state["optimizer_state_dict"]["loss_scaler"] is scaler


@pytest.mark.parametrize("copied", [host_copy, plain])
def test_what_is_written_names_no_class_of_deepspeed(tmp_path, copied):
    state = copied(of_deepspeed())
    assert state == PLAIN
    torch.save(state, tmp_path / "state.pt")
    with zipfile.ZipFile(tmp_path / "state.pt") as archive:
        (pickled,) = (archive.read(name) for name in archive.namelist() if name.endswith("data.pkl"))
    named = {str(argument) for code, argument, _ in pickletools.genops(pickled) if code.name == "GLOBAL"}
    assert named == {"collections OrderedDict", "torch Size"}


def test_a_copied_state_is_independent_and_shares_what_it_shared():
    weight, step = torch.arange(6.0).view(2, 3), torch.tensor(3.0)
    state = {"module": {"embed": weight, "head": weight, "part": weight[1:]}, "steps": [step], "lr": ({"now": 0.1}, 7)}
    copied = host_copy(state)
    weight.zero_()
    step += 1
    state["lr"][0]["now"] = 0.2
    assert copied["module"]["embed"].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert copied["module"]["part"].untyped_storage().nbytes() == 3 * 4, "only what is looked at"
    assert copied["module"]["head"] is copied["module"]["embed"]
    assert (copied["steps"], copied["lr"]) == ([torch.tensor(3.0)], ({"now": 0.1}, 7))


ATTACKS: dict[str, Callable[[], Any]] = {
    "a call": lambda: Call(os.mkdir, "ran"),
    "a call of an attribute": lambda: Call(Call(getattr, Call(__import__, "os"), "mkdir"), "ran"),
    "no member": lambda: Call(getattr, stages(), "__class__"),
    "of a class that is allowed": lambda: Call(getattr, OrderedDict, "fromkeys"),
    "of a member": lambda: Call(getattr, Call(getattr, stages(), "weights"), "__class__"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_other_name_is_read(tmp_path, monkeypatch, attack):
    monkeypatch.chdir(tmp_path)
    torch.save({"zero_stage": ATTACKS[attack]()}, tmp_path / "state.pt")
    with pytest.raises(ValueError, match="is not a file of tensors"):
        read(tmp_path / "state.pt")
    assert not (tmp_path / "ran").exists()
