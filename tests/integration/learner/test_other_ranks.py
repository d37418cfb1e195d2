"""Checkpoints that another number of ranks or ZeRO stage resumes: nothing of weights, moments and counts is lost."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest
import torch

from tests.support.learner import run_ranks, save_tiny_model

pytestmark = [pytest.mark.integration, pytest.mark.slow]

LORA = {"rank": 4, "alpha": 8}
# What two ranks write after two steps, while they take two more.
WRITTEN: dict[str, dict[str, Any]] = {
    "stage 0": {"zero_stage": 0},
    "stage 2": {"zero_stage": 2},
    "stage 3": {"zero_stage": 3},
    "stage 0 in bfloat16": {"zero_stage": 0, "dtype": "bfloat16"},
    "stage 2 in bfloat16": {"zero_stage": 2, "dtype": "bfloat16", "mini_batches": 2},
    "stage 3 in bfloat16": {"zero_stage": 3, "dtype": "bfloat16"},
    "adapter, stage 2": {"zero_stage": 2, "dtype": "bfloat16", "lora": LORA},
    "adapter, stage 3": {"zero_stage": 3, "lora": LORA},
}
# Who resumes it: ranks, and what is other than it was.
RESUMED: list[tuple[str, int, dict[str, Any]]] = [
    *((name, ranks, {}) for name in WRITTEN for ranks in (1, 3)),
    ("stage 0", 3, {"zero_stage": 2}),
    ("stage 0", 2, {"zero_stage": 3}),
    ("stage 2", 1, {"zero_stage": 0}),
    ("stage 2", 3, {"zero_stage": 3}),
    ("stage 3", 1, {"zero_stage": 0}),
    ("stage 3", 2, {"zero_stage": 1}),
    ("stage 2 in bfloat16", 3, {"zero_stage": 3}),
    ("stage 3 in bfloat16", 1, {"zero_stage": 2}),
    ("adapter, stage 3", 3, {"zero_stage": 2}),
]


# What only those can resume who wrote it, and who tries: ranks and settings.
ROWS = {"optimizer": {"type": "Adafactor", "params": {"lr": 1e-3}}, "zero_allow_untested_optimizer": True}
INDIVISIBLE: dict[str, dict[str, Any]] = {
    "elastic": {"zero_stage": 2, "deepspeed": {"zero_optimization": {"elastic_checkpoint": True}}},
    "rows": {"zero_stage": 0, "deepspeed": ROWS},
}
REFUSED = {"elastic": (1, INDIVISIBLE["elastic"]), "rows": (2, {"zero_stage": 2, "deepspeed": ROWS})}


def named(name: str, ranks: int, other: dict[str, Any]) -> str:
    return f"{name} by {ranks}" + "".join(f" with {key} {value}" for key, value in other.items())


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each left: those that wrote went on to version 4 themselves."""
    folder = tmp_path_factory.mktemp("others")
    # Tied weights, and sizes that three ranks do not divide evenly.
    model = save_tiny_model(folder / "model", hidden=40)
    common = {"model": model, "steps": 4, "inspect": [2]}
    settings = {"grad_clip": 0.5, "weight_decay": 0.01}
    writing = {
        name: common | {"folder": str(folder / name), "begin": 2, "learner": settings | learner}
        for name, learner in WRITTEN.items()
    }
    for name, learner in INDIVISIBLE.items():
        writing[name] = {"model": model, "folder": str(folder / name), "steps": 1, "save": [1], "learner": learner}
    left = run_ranks(2, writing, folder)
    for ranks in (1, 2, 3):
        resuming = {
            named(*who): common
            | {"folder": str(folder / who[0]), "load": True, "learner": settings | WRITTEN[who[0]] | who[2]}
            for who in RESUMED
            if who[1] == ranks
        }
        for name, who in REFUSED.items():
            if who[0] == ranks:
                resuming[f"{name} refused"] = writing[name] | {"load": True, "refused": True, "learner": who[1]}
        if ranks == 2:
            torn = folder / "torn"
            shutil.copytree(folder / "stage 2", torn)
            metadata = torn / "default/checkpoints/step_2/checkpoint.json"
            fields, lost = json.loads(metadata.read_text()), "deepspeed/zero_pp_rank_1_mp_rank_00_optim_states.pt"
            del fields["files"][lost]
            metadata.write_text(json.dumps(fields))
            (metadata.parent / lost).unlink()
            torn_job = {"folder": str(torn), "load": True, "refused": True, "learner": settings | {"zero_stage": 3}}
            resuming["torn"] = common | torn_job
        left |= run_ranks(ranks, resuming, folder)
    return left


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
    half = "bfloat16" in str(WRITTEN[who[0]])
    rtol = 2e-2 if half else 1e-3
    assert resumed["weights"].keys() == straight["weights"].keys()
    for name, weight in straight["weights"].items():
        torch.testing.assert_close(resumed["weights"][name], weight, rtol=rtol, atol=rtol / 10)
    assert [step["actor/lr"] for step in resumed["metrics"]] == [step["actor/lr"] for step in straight["metrics"][2:]]


@pytest.mark.parametrize(
    ("name", "division", "reason"),
    [
        ("elastic", "ranks = 2 (here 1)", "it was written with zero_optimization.elastic_checkpoint"),
        ("rows", "zero_stage = 0 (here 2)", "its optimizer has 'row_var' of another shape than the weights"),
    ],
)
def test_ranks_that_a_checkpoint_cannot_serve_are_told_which_it_serves(results, name, division, reason):
    line = results[f"{name} refused"]["refused"]
    assert f"was written with {division}, and cannot be divided in another way: {reason}; start the" in line
    assert "\n" not in line


def test_a_checkpoint_without_the_file_of_a_rank_is_refused_by_all_that_need_it(results):
    assert "cannot be read (the optimizer's file of rank 1 of 2 is missing)" in results["torn"]["refused"]
