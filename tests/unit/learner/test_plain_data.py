"""What a checkpoint's files hold, whatever Python wrote them, and what no reader takes from them."""

from __future__ import annotations

import os
import pickletools
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from learner.checkpoint.plain_data import host_copy, plain, read, reads_plain_data
from tests.support.learner import Call

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

    return PLAIN | {
        "zero_stage": stages().weights,
        "loss_scaler": LossScaler(1.0),
        "param_slice_mappings": [OrderedDict(weight=fragment_address(numel=4, start=2))],
        **changes,
    }


def stages() -> Any:
    from deepspeed.runtime.zero.config import ZeroStageEnum

    return ZeroStageEnum


FILES: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": lambda: PLAIN,
    "by value, as Python 3.11.7 wrote it": lambda: of_deepspeed(zero_stage=Call(stages(), 3)),
    "by name, as Python 3.11.2 wrote it": lambda: of_deepspeed(zero_stage=Call(getattr, stages(), "weights")),
}


@pytest.mark.parametrize("kind", FILES)
def test_files_of_every_python_are_read(tmp_path: Path, kind: str) -> None:
    path, scaler = tmp_path / "state.pt", of_deepspeed()["loss_scaler"]
    torch.save({"optimizer_state_dict": FILES[kind]()}, path)
    assert read(path) == {"optimizer_state_dict": PLAIN}
    engine = SimpleNamespace(
        checkpoint_engine=SimpleNamespace(load=None), optimizer=SimpleNamespace(loss_scaler=scaler)
    )
    with reads_plain_data(engine):
        state = engine.checkpoint_engine.load(str(path))
    assert state["optimizer_state_dict"]["loss_scaler"] is scaler


@pytest.mark.parametrize("copied", [host_copy, plain])
def test_what_is_written_names_no_class_of_deepspeed(tmp_path: Path, copied: Any) -> None:
    state = copied(of_deepspeed())
    assert state == PLAIN
    torch.save(state, tmp_path / "state.pt")
    with zipfile.ZipFile(tmp_path / "state.pt") as archive:
        (pickled,) = (archive.read(name) for name in archive.namelist() if name.endswith("data.pkl"))
    named = {str(argument) for code, argument, _ in pickletools.genops(pickled) if code.name == "GLOBAL"}
    assert named == {"collections OrderedDict", "torch Size"}


def test_a_copied_state_is_independent_and_shares_what_it_shared() -> None:
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
def test_no_other_name_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attack: str) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"zero_stage": ATTACKS[attack]()}, tmp_path / "state.pt")
    with pytest.raises(ValueError, match="is not a file of tensors"):
        read(tmp_path / "state.pt")
    assert not (tmp_path / "ran").exists()
