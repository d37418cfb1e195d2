"""Checkpoints that others read: another number of ranks, another ZeRO stage, or an export made later."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from common.config import Config, parse_config
from common.errors import UserError
from learner.checkpoint.export import export_checkpoint
from tests.support.families import save_tiny
from tests.support.learner import Call, assert_same_weights, run_ranks, save_tiny_model, without_export

pytestmark = pytest.mark.slow

LORA = {"rank": 4, "alpha": 8}
# What two ranks write after two steps, while they take two more.
WRITTEN: dict[str, dict[str, Any]] = {
    "stage 0": {"zero_stage": 0},
    "stage 2": {"zero_stage": 2},
    "stage 3": {"zero_stage": 3},
    "stage 2 in bfloat16": {"zero_stage": 2, "dtype": "bfloat16", "mini_batches": 2},
    "adapter, stage 3": {"zero_stage": 3, "lora": LORA},
    "mixture, stage 3": {"zero_stage": 3, "dtype": "bfloat16"},
    "mixture, adapter, stage 3": {"zero_stage": 3, "lora": LORA},
}
# How checkpoints are resumed: the number of ranks, and the settings that differ.
RESUMED: list[tuple[str, int, dict[str, Any]]] = [
    *((name, 3, {}) for name in WRITTEN),
    ("stage 0", 2, {"zero_stage": 3}),
    ("stage 2", 1, {"zero_stage": 0}),
    ("stage 3", 1, {"zero_stage": 0}),
    ("stage 2 in bfloat16", 3, {"zero_stage": 3}),
    ("adapter, stage 3", 3, {"zero_stage": 2}),
]
ROWS = {"optimizer": {"type": "Adafactor", "params": {"lr": 1e-3}}, "zero_allow_untested_optimizer": True}
ELASTIC = {"zero_stage": 2, "deepspeed": {"zero_optimization": {"elastic_checkpoint": True}}}
# Checkpoints that only their writers can resume: settings; the number of ranks that try, and their settings.
INDIVISIBLE: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "elastic": (ELASTIC, 1, ELASTIC),
    "rows": ({"zero_stage": 0, "deepspeed": ROWS}, 2, {"zero_stage": 2, "deepspeed": ROWS}),
}
WHOLE, PIECES = "mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"


def named(name: str, ranks: int, other: dict[str, Any]) -> str:
    return f"{name} by {ranks}" + "".join(f" with {key} {value}" for key, value in other.items())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("others")


@pytest.fixture(scope="module")
def models(folder: Path) -> dict[str, str]:
    """A dense model with tied weights, and sizes that three ranks do not divide evenly; and a mixture of experts."""
    save_tiny(folder / "mixture of experts", "Qwen3-MoE")
    return {"mixture": str(folder / "mixture of experts"), "": save_tiny_model(folder / "model", hidden=40)}


@pytest.fixture(scope="module")
def model(models: dict[str, str]) -> str:
    return models[""]


@pytest.fixture(scope="module")
def results(folder: Path, models: dict[str, str]) -> dict[str, Any]:
    """The results of all jobs; those that wrote went on to version 4 themselves."""

    def job(name: str, learner: dict[str, Any], **others: Any) -> dict[str, Any]:
        learner = {"grad_clip": 0.5, "weight_decay": 0.01} | learner
        own = {"model": model_of(models, name), "folder": str(folder / name), "learner": learner}
        return own | {"steps": 4, "inspect": [2]} | others

    writing = {name: job(name, learner, begin=2) for name, learner in WRITTEN.items()}
    for name, (learner, *_) in INDIVISIBLE.items():
        writing[name] = job(name, learner, steps=1, inspect=[], save=[1])
    left = run_ranks(2, writing, folder)
    lose_a_file(folder)
    for ranks in (1, 2, 3):
        resuming = {named(*who): job(who[0], WRITTEN[who[0]] | who[2], load=True) for who in RESUMED if who[1] == ranks}
        for name, (_, readers, learner) in INDIVISIBLE.items():
            if readers == ranks:
                resuming[f"{name} refused"] = job(name, learner, refused=True)
        if ranks == 2:
            resuming["torn"] = job("torn", {"zero_stage": 3}, refused=True)
        left |= run_ranks(ranks, resuming, folder)
    return left


def model_of(models: dict[str, str], name: str) -> str:
    return next(path for kind, path in models.items() if name.startswith(kind))


def lose_a_file(folder: Path) -> None:
    shutil.copytree(folder / "stage 2", folder / "torn")
    metadata = folder / "torn/default/checkpoints/step_2/checkpoint.json"
    fields, lost = json.loads(metadata.read_text()), f"deepspeed/{PIECES}"
    del fields["files"][lost]
    metadata.write_text(json.dumps(fields))
    (metadata.parent / lost).unlink()


@pytest.mark.parametrize("who", RESUMED, ids=lambda who: named(*who))
def test_others_hold_the_same_bits_and_go_on_the_same(results, who):
    resumed, straight = results[named(*who)], results[who[0]]
    assert resumed["loaded"] == 2
    expected, state = straight["states"][2], resumed["states"][2]
    assert state.keys() == expected.keys()
    for name, tensors in expected.items():
        assert tensors["exp_avg_sq"].max() > 0
        for key, value in tensors.items():
            assert torch.equal(torch.as_tensor(state[name][key]), torch.as_tensor(value)), f"{key} of {name}"
    assert_same_weights(resumed, straight, rtol=2e-2 if "bfloat16" in str(WRITTEN[who[0]]) else 1e-3)
    assert [step["actor/lr"] for step in resumed["metrics"]] == [step["actor/lr"] for step in straight["metrics"][2:]]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("elastic", "ranks = 2 (here 1), and cannot be divided in another way: it was written with zero_optimization"),
        ("rows", "zero_stage = 0 (here 2), and cannot be divided in another way: its optimizer has 'row_var'"),
    ],
)
def test_ranks_that_cannot_resume_are_told_which_can(results, name, words):
    line = results[f"{name} refused"]["refused"]
    assert f"was written with {words}" in line
    assert "\n" not in line


def test_a_checkpoint_without_the_file_of_a_rank_is_refused(results):
    assert "cannot be read (the optimizer's file of rank 1 of 2 is missing)" in results["torn"]["refused"]


def step(folder: Path, name: str) -> Path:
    return folder / name / "default" / "checkpoints" / "step_2"


def settings(model: str, name: str) -> Config:
    """What whole weights were trained in is in the checkpoint, whatever the configuration says by now."""
    written = {"dtype": "float32"} | WRITTEN[name]
    learner = {key: written[key] for key in ("lora", "dtype")} if "lora" in written else {}
    return parse_config({"model": {"path": model}, "data": {"train": "none.jsonl"}, "learner": learner})


@pytest.mark.parametrize("name", WRITTEN)
def test_a_later_export_has_the_same_files(results, folder, models, tmp_path, name):
    made, output = step(folder, name), tmp_path / "out"
    export_checkpoint(settings(model_of(models, name), name), without_export(made, tmp_path / "copy"), output)
    assert {path.name for path in output.iterdir()} == {path.name for path in (made / "hf").iterdir()}
    expected, exported = (load_file(path / "model.safetensors") for path in (made / "hf", output))
    assert exported.keys() == expected.keys()
    for key, weight in expected.items():
        assert exported[key].dtype == weight.dtype == getattr(torch, WRITTEN[name].get("dtype", "float32"))
        assert torch.equal(exported[key], weight), key


@pytest.fixture
def unsummed(results: dict[str, Any], folder: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Copies a checkpoint without an export, whose files may be changed unnoticed."""

    def copied(name: str, **fields: Any) -> Path:
        copy = without_export(step(folder, name), tmp_path / "copy")
        metadata = json.loads((copy / "checkpoint.json").read_text())
        (copy / "checkpoint.json").write_text(json.dumps(metadata | {"files": {}} | fields))
        return copy

    return copied


def test_whole_weights_are_read_without_the_optimizers_files(unsummed, model, tmp_path):
    copy = unsummed("stage 2")
    for path in (copy / "deepspeed").glob("*_optim_states.pt"):
        path.unlink()
    export_checkpoint(settings(model, "stage 2"), copy, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_damaged_and_foreign_checkpoints_are_not_exported(results, folder, model, tmp_path):
    copy = without_export(step(folder, "stage 0"), tmp_path / "copy")
    other = save_tiny_model(tmp_path / "other", hidden=32)
    with pytest.raises(UserError, match="is of another model than .*other.*does not fit"):
        export_checkpoint(settings(other, "stage 0"), copy, tmp_path / "out")
    states = copy / "deepspeed" / WHOLE
    states.write_bytes(states.read_bytes()[:-1] + b"x")
    with pytest.raises(UserError, match=f"is damaged: deepspeed/{WHOLE} has another checksum"):
        export_checkpoint(settings(model, "stage 0"), copy, tmp_path / "out")
    assert not (tmp_path / "out").exists()


UNREADABLE: dict[str, Callable[[Path], object]] = {
    "gone": Path.unlink,
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:2000]),
    "text": lambda path: path.write_text("no archive"),
    "code": lambda path: torch.save({"module": Call(os.mkdir, f"{path}.ran")}, path),
    "something else": lambda path: torch.save({"module": 7, "optimizer_state_dict": [1]}, path),
}


@pytest.mark.parametrize("change", UNREADABLE)
@pytest.mark.parametrize(("name", "file"), [("stage 0", WHOLE), ("stage 3", PIECES)])
def test_a_file_that_cannot_be_read_is_one_line_and_runs_nothing(unsummed, model, tmp_path, change, name, file):
    copy = unsummed(name)
    UNREADABLE[change](copy / "deepspeed" / file)
    with pytest.raises(UserError, match=r"^checkpoint .*copy cannot be read: [^\n]+$"):
        export_checkpoint(settings(model, name), copy, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not list(copy.rglob("*.ran"))


def test_an_adapter_that_cannot_be_read_is_one_line(unsummed, model, tmp_path):
    copy = unsummed("stage 0", lora={"rank": 4})
    (copy / "adapter").mkdir()
    (copy / "adapter" / "adapter_model.safetensors").write_bytes(b"cut short")
    with pytest.raises(UserError, match=r"^checkpoint .*copy cannot be read: [^\n]+$"):
        export_checkpoint(settings(model, "stage 0"), copy, tmp_path / "out")
