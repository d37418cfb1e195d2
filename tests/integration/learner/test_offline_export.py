"""The model of a checkpoint from the ranks' files alone, and files that are not what a learner wrote."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from common.config import Config, parse_config
from common.errors import UserError
from learner.export import export_checkpoint
from tests.support.learner import run_ranks, save_tiny_model, without_export

pytestmark = [pytest.mark.integration, pytest.mark.slow]

WHOLE, PIECES = "mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"
# Ranks and settings of what is exported.
WRITTEN: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "alone in bfloat16": (1, {"dtype": "bfloat16"}),
    "stage 2": (2, {"zero_stage": 2}),
    "stage 3": (2, {"zero_stage": 3}),
    "stage 3 in bfloat16": (2, {"zero_stage": 3, "dtype": "bfloat16"}),
}


@pytest.fixture(scope="module")
def written(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoint of each of them, by its name."""
    folder = tmp_path_factory.mktemp("written")
    for ranks in (1, 2):
        jobs = {
            name: {"model": model, "folder": str(folder / name), "save": [1], "learner": learner}
            for name, (count, learner) in WRITTEN.items()
            if count == ranks
        }
        run_ranks(ranks, jobs, folder)
    return folder


def step(written: Path, name: str) -> Path:
    return written / name / "default" / "checkpoints" / "step_1"


def settings(model: str, dtype: str = "float32") -> Config:
    return parse_config({"model": {"path": model}, "data": {"train": "none.jsonl"}, "learner": {"dtype": dtype}})


def without_sums(checkpoint: Path, copy: Path) -> Path:
    """A copy of a checkpoint without an export, whose files somebody may change unnoticed."""
    without_export(checkpoint, copy)
    metadata = json.loads((copy / "checkpoint.json").read_text())
    (copy / "checkpoint.json").write_text(json.dumps(metadata | {"files": {}}))
    return copy


@pytest.mark.parametrize("name", WRITTEN)
def test_a_checkpoint_without_an_export_is_exported_later_to_the_same_files(written, model, tmp_path, name):
    made = step(written, name)
    # What it was trained in is in the checkpoint, whatever the configuration says by now.
    export_checkpoint(settings(model), without_export(made, tmp_path / "copy"), tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {path.name for path in (made / "hf").iterdir()}
    expected, exported = (load_file(path / "model.safetensors") for path in (made / "hf", tmp_path / "out"))
    assert exported.keys() == expected.keys()
    for key, weight in expected.items():
        assert exported[key].dtype == weight.dtype == getattr(torch, WRITTEN[name][1].get("dtype", "float32"))
        assert torch.equal(exported[key], weight), key


def test_where_weights_are_whole_the_optimizers_files_are_not_read(written, model, tmp_path):
    copy = without_sums(step(written, "stage 2"), tmp_path / "copy")
    for path in (copy / "deepspeed").glob("*_optim_states.pt"):
        path.unlink()
    export_checkpoint(settings(model), copy, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_a_damaged_checkpoint_and_one_of_another_model_are_not_exported(written, model, tmp_path):
    copy = without_export(step(written, "alone"), tmp_path / "copy")
    other = save_tiny_model(tmp_path / "other", hidden=32)
    with pytest.raises(UserError, match="is of another model than .*other.*does not fit"):
        export_checkpoint(settings(other), copy, tmp_path / "out")
    states = copy / "deepspeed" / WHOLE
    states.write_bytes(states.read_bytes()[:-1] + b"x")
    with pytest.raises(UserError, match=f"is damaged: deepspeed/{WHOLE} has another checksum"):
        export_checkpoint(settings(model), copy, tmp_path / "out")
    assert not (tmp_path / "out").exists()


class Code:
    """Makes a folder when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.mark,)


UNREADABLE: dict[str, Callable[[Path], object]] = {
    "gone": Path.unlink,
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:2000]),
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("no archive"),
    "code": lambda path: torch.save({"module": Code(path.with_suffix(".ran"))}, path),
    "something else": lambda path: torch.save({"module": 7, "optimizer_state_dict": [1]}, path),
}


@pytest.mark.parametrize("change", UNREADABLE)
@pytest.mark.parametrize(("name", "file"), [("alone", WHOLE), ("stage 3", PIECES)])
def test_without_sums_a_file_that_cannot_be_read_is_one_line_and_runs_nothing(
    written, model, tmp_path, change, name, file
):
    copy = without_sums(step(written, name), tmp_path / "copy")
    UNREADABLE[change](copy / "deepspeed" / file)
    with pytest.raises(UserError, match=r"^checkpoint .*copy cannot be read: [^\n]+$"):
        export_checkpoint(settings(model), copy, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not list(copy.rglob("*.ran"))


def test_an_adapter_that_cannot_be_read_is_one_line(written, model, tmp_path):
    copy = without_sums(step(written, "alone"), tmp_path / "copy")
    metadata = json.loads((copy / "checkpoint.json").read_text())
    (copy / "checkpoint.json").write_text(json.dumps(metadata | {"lora": {"rank": 4}}))
    (copy / "adapter").mkdir()
    (copy / "adapter" / "adapter_model.safetensors").write_bytes(b"cut short")
    with pytest.raises(UserError, match=r"^checkpoint .*copy cannot be read: [^\n]+$"):
        export_checkpoint(settings(model), copy, tmp_path / "out")
