"""What a checkpoint's files hold, whatever Python wrote them, and what no reader takes from them."""

from __future__ import annotations

import os
import pickletools
import zipfile
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from learner.plain_data import host_copy, plain, read, reads_plain_data

PLAIN = {
    "zero_stage": 3,
    "loss_scaler": {"cur_scale": 1.0, "dynamic": False},
    "param_slice_mappings": [OrderedDict(weight={"numel": 4, "start": 2})],
    "shape": torch.Size([2, 2]),
}
OF_DEEPSPEED = PLAIN | {
    "zero_stage": ZeroStageEnum.weights,
    "loss_scaler": LossScaler(1.0),
    "param_slice_mappings": [OrderedDict(weight=fragment_address(numel=4, start=2))],
}


class Reduced:
    """Is pickled as a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call

    def __call__(self) -> None:
        """What is pickled as a function must look like one."""


FILES: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "by value, as Python 3.11.7 wrote it": OF_DEEPSPEED | {"zero_stage": Reduced(ZeroStageEnum, 3)},
    "by name, as Python 3.11.2 wrote it": OF_DEEPSPEED | {"zero_stage": Reduced(getattr, ZeroStageEnum, "weights")},
}


def names(path: Path) -> set[str]:
    """What a file of torch's names for its reader to call or to make."""
    with zipfile.ZipFile(path) as archive:
        (pickled,) = (archive.read(name) for name in archive.namelist() if name.endswith("data.pkl"))
    return {str(argument) for code, argument, _ in pickletools.genops(pickled) if code.name == "GLOBAL"}


@pytest.mark.parametrize("kind", FILES)
def test_files_of_every_python_are_read(tmp_path: Path, kind: str) -> None:
    torch.save({"optimizer_state_dict": FILES[kind]}, tmp_path / "state.pt")
    assert read(tmp_path / "state.pt") == {"optimizer_state_dict": PLAIN}
    scaler = LossScaler(1.0)
    engine = SimpleNamespace(
        checkpoint_engine=SimpleNamespace(load=None), optimizer=SimpleNamespace(loss_scaler=scaler)
    )
    with reads_plain_data(engine):
        state = engine.checkpoint_engine.load(str(tmp_path / "state.pt"))
    assert state["optimizer_state_dict"]["loss_scaler"] is scaler


def test_what_is_written_names_no_class_of_deepspeed(tmp_path: Path) -> None:
    for state in (host_copy(OF_DEEPSPEED), plain(OF_DEEPSPEED)):
        assert state == PLAIN
        torch.save(state, tmp_path / "state.pt")
        assert names(tmp_path / "state.pt") == {"collections OrderedDict", "torch Size"}


ATTACKS: dict[str, Any] = {
    "a call": Reduced(os.mkdir, "ran"),
    "a call of an attribute": Reduced(Reduced(getattr, Reduced(__import__, "os"), "mkdir"), "ran"),
    "no member": Reduced(getattr, ZeroStageEnum, "__class__"),
    "of a class that is allowed": Reduced(getattr, OrderedDict, "fromkeys"),
    "of tensors": Reduced(getattr, torch.Tensor, "__subclasses__"),
    "of a member": Reduced(getattr, Reduced(getattr, ZeroStageEnum, "weights"), "__class__"),
    "setattr": Reduced(setattr, ZeroStageEnum, "weights", 1),
    "eval": Reduced(eval, "1"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_other_name_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attack: str) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"zero_stage": ATTACKS[attack]}, tmp_path / "state.pt")
    with pytest.raises(ValueError, match="is not a file of tensors"):
        read(tmp_path / "state.pt")
    assert not (tmp_path / "ran").exists()
