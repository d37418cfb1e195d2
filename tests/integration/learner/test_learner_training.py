"""Training over several steps: it learns, stays equal over ranks and stages, and goes on from a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.learner import run_ranks

pytestmark = pytest.mark.integration


def job(model: str, folder: Path, steps: int, **others: Any) -> dict[str, Any]:
    names = ("load", "save", "advantage", "repeat", "full", "fills_up", "forged", "whole")
    own = {key: others.pop(key) for key in names if key in others}
    folder.mkdir(exist_ok=True)
    return {"model": model, "folder": str(folder), "steps": steps, "learner": others} | own


def assert_same(found: dict[str, Any], expected: dict[str, Any], rtol: float = 0.0) -> None:
    assert found["weights"].keys() == expected["weights"].keys()
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], weight, rtol=rtol, atol=rtol / 10)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("alone")


@pytest.fixture(scope="module")
def alone(model: str, folder: Path) -> dict[str, Any]:
    """Jobs of one rank; those with a schedule and mini-batches have most to remember."""
    rich = {"mini_batches": 3, "schedule": "cosine", "warmup_steps": 2, "grad_clip": 0.5, "weight_decay": 0.01}
    half = {"dtype": "bfloat16", "mini_batches": 2}
    ledger = {"sampler": {"drift": {"mode": "ledger"}}}
    todo = {
        "straight": job(model, folder / "straight", 4, **rich),
        "first half": job(model, folder / "halves", 2, save=[1, 2], **rich),
        "second half": job(model, folder / "halves", 4, load=True, **rich),
        "bf16 straight": job(model, folder / "bf16", 4, **half),
        "bf16 first half": job(model, folder / "bf16 halves", 2, save=[2], **half),
        "bf16 second half": job(model, folder / "bf16 halves", 4, load=True, **half),
        "bf16 stage 2": job(model, folder / "bf16", 4, zero_stage=2, **half),
        "drift": job(model, folder / "drift", 2, **ledger),
        "praised": job(model, folder / "praised", 4, advantage=1.0, repeat=True, lr=3e-3),
        "fills up": job(model, folder / "halves", 4, load=True, fills_up=1 << 16, **rich),
        "forged": job(model, folder / "forged", 1, save=[1]),
        "read forged": job(model, folder / "forged", 0, forged=1),
        "keep one": job(model, folder / "kept", 3, save=[1, 2, 3], keep_checkpoints=1, export=False),
    }
    return run_ranks(1, todo, folder)


@pytest.fixture(scope="module")
def pair(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Jobs of two ranks."""
    folder = tmp_path_factory.mktemp("pair")
    todo = {}
    for stage in (0, 2, 3):
        here = folder / f"stage {stage}"
        todo |= {
            f"{stage} straight": job(model, here, 3, zero_stage=stage, grad_clip=0.5),
            f"{stage} first half": job(model, here, 2, save=[2], full=True, zero_stage=stage, grad_clip=0.5),
            f"{stage} second half": job(model, here, 3, load=True, zero_stage=stage, grad_clip=0.5),
        }
    todo["fills up"] = job(model, folder / "fills up", 2, save=[1, 2], fills_up=20_000, zero_stage=2)
    for precision in ("float32", "bfloat16"):
        here = folder / precision
        settings = {"zero_stage": 3, "dtype": precision, "algorithm": {"kl_coef": 0.1}}
        todo |= {
            f"{precision} in pieces": job(model, here, 2, save=[2], **settings),
            f"{precision} whole": job(model, here, 2, whole=True, **settings),
        }
    return run_ranks(2, todo, folder) | {"folder": folder}


def test_training_raises_the_likelihood_of_what_is_praised(alone):
    # E[log pi_rollout - log pi] over the same tokens: falls as the policy comes to favour them.
    gaps = [metrics["rollout_corr/kl"] for metrics in alone["praised"]["metrics"]]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[0] - gaps[-1] > 0.1


@pytest.mark.parametrize("precision", ["", "bf16 "])
def test_a_resumed_run_has_the_weights_of_one_that_never_stopped(alone, precision):
    assert alone[f"{precision}second half"]["loaded"] == 2
    assert_same(alone[f"{precision}second half"], alone[f"{precision}straight"])


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_sharded_runs_resume_to_the_same_weights(pair, stage):
    assert pair[f"{stage} second half"]["loaded"] == 2
    assert_same(pair[f"{stage} second half"], pair[f"{stage} straight"])


@pytest.mark.parametrize("stage", [2, 3])
def test_zero_stages_train_the_same_weights(pair, stage):
    assert_same(pair[f"{stage} straight"], pair["0 straight"], rtol=1e-3)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_models_that_are_loaded_in_pieces_are_trained_to_the_same_bits(pair, precision):
    in_pieces, whole = pair[f"{precision} in pieces"], pair[f"{precision} whole"]
    assert_same(in_pieces, whole)
    assert [step["actor/kl_loss"] for step in in_pieces["metrics"]] == [
        step["actor/kl_loss"] for step in whole["metrics"]
    ]
    exported = pair["folder"] / precision / "default" / "checkpoints" / "step_2" / "hf"
    for name, weight in AutoModelForCausalLM.from_pretrained(exported, dtype=precision).named_parameters():
        torch.testing.assert_close(weight.detach(), whole["weights"][name], rtol=0, atol=0)


def test_bfloat16_trains_in_every_step(model, alone):
    found = alone["bf16 straight"]
    original = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    for name, weight in original.named_parameters():
        assert found["weights"][name].dtype == torch.bfloat16
        assert not torch.equal(found["weights"][name], weight), name
    # Without sharding asked for, the same fp32 accumulation and master weights as with it.
    assert_same(alone["bf16 stage 2"], found, rtol=1e-2)


def test_ledger_mode_measures_how_far_a_step_moved_the_policy(alone):
    assert all(metrics["actor/drift"] > 0 for metrics in alone["drift"]["metrics"])
    assert "actor/drift" not in alone["straight"]["metrics"][0]


def test_only_the_newest_checkpoints_are_kept(alone, folder):
    assert [path.name for path in (folder / "kept" / "default" / "checkpoints").iterdir()] == ["step_3"]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_full_disk_is_a_users_error_on_every_rank_and_earlier_checkpoints_stay(pair, stage):
    assert "MiB are free; earlier checkpoints are kept" in pair[f"{stage} first half"]["refused"]
    checkpoints = pair["folder"] / f"stage {stage}" / "default" / "checkpoints"
    assert [path.name for path in checkpoints.iterdir()] == ["step_2"]


def test_a_disk_that_fills_up_while_a_file_is_written_loses_no_checkpoint(alone, folder):
    assert "cannot write checkpoint" in alone["fills up"]["refused"]
    assert "earlier checkpoints are kept" in alone["fills up"]["refused"]
    assert {path.name for path in (folder / "halves" / "default" / "checkpoints").iterdir()} == {"step_1", "step_2"}
    assert_same(alone["fills up"], alone["straight"])


def test_where_one_rank_cannot_write_all_say_so_and_no_checkpoint_is_lost(pair):
    assert pair["fills up"]["refused"].startswith("rank 1: cannot write checkpoint")
    checkpoints = pair["folder"] / "fills up" / "default" / "checkpoints"
    assert {path.name for path in checkpoints.iterdir()} == {"step_1", "step_2"}


def test_a_checkpoint_that_names_code_is_refused_and_runs_none(alone, folder):
    assert "cannot be read" in alone["read forged"]["refused"]
    assert not list(folder.glob("*.ran"))


@pytest.mark.parametrize("stage", [0, 3])
def test_the_export_is_an_ordinary_model_with_the_trained_weights(model, pair, stage):
    checkpoints = pair["folder"] / f"stage {stage}" / "default" / "checkpoints"
    assert json.loads((checkpoints / "step_2" / "checkpoint.json").read_text())["version"] == 2
    assert len({file.stat().st_mode for file in (checkpoints / "step_2" / "hf").iterdir()}) == 1
    exported = AutoModelForCausalLM.from_pretrained(checkpoints / "step_2" / "hf", dtype=torch.float32)
    original = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    assert exported.lm_head.weight is exported.model.embed_tokens.weight
    ids = torch.arange(12)[None]
    assert exported(ids).logits.shape == original(ids).logits.shape
    assert not torch.equal(exported(ids).logits, original(ids).logits)
