"""Training over several steps: it learns, stays equal over ranks and stages, and goes on from a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.support.learner import assert_same_weights, job, run_ranks
from tests.support.mixtures import save_mixture

pytestmark = [pytest.mark.integration, pytest.mark.slow]

STAGES = (0, 2, 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("alone")


@pytest.fixture(scope="module")
def mixture(folder: Path) -> str:
    save_mixture(folder / "mixture", "Qwen3-MoE")
    return str(folder / "mixture")


@pytest.fixture(scope="module")
def alone(model: str, folder: Path) -> dict[str, Any]:
    """Jobs of one rank; those with a schedule and mini-batches have most to remember."""
    rich = {"mini_batches": 3, "schedule": "cosine", "warmup_steps": 2, "grad_clip": 0.5, "weight_decay": 0.01}
    half = {"dtype": "bfloat16", "mini_batches": 2}
    todo = {
        "straight": job(model, folder / "straight", 4, rich),
        "first half": job(model, folder / "halves", 2, rich, save=[1, 2]),
        "second half": job(model, folder / "halves", 4, rich, load=True),
        "bf16 straight": job(model, folder / "bf16", 4, half),
        "bf16 first half": job(model, folder / "bf16 halves", 2, half, save=[2]),
        "bf16 second half": job(model, folder / "bf16 halves", 4, half, load=True),
        "bf16 stage 2": job(model, folder / "bf16", 4, half | {"zero_stage": 2}),
        "drift": job(model, folder / "drift", 2, {"sampler": {"drift": {"mode": "ledger"}}}),
        "praised": job(model, folder / "praised", 4, {"lr": 3e-3}, advantage=1.0, repeat=True),
        "forged": job(model, folder / "forged", 1, {}, save=[1]),
        "read forged": job(model, folder / "forged", 0, {}, forged=1),
    }
    return run_ranks(1, todo, folder)


@pytest.fixture(scope="module")
def pair(model: str, mixture: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Jobs of two ranks."""
    folder = tmp_path_factory.mktemp("pair")
    todo = {}
    for kind, path in (("", model), ("mixture ", mixture)):
        for stage in STAGES:
            here, learner = folder / f"{kind}stage {stage}", {"zero_stage": stage, "grad_clip": 0.5}
            todo |= {
                f"{kind}{stage} straight": job(path, here, 3, learner),
                f"{kind}{stage} first half": job(path, here, 2, learner, save=[2], full=True),
                f"{kind}{stage} second half": job(path, here, 3, learner, load=True),
            }
            if stage == 2:
                exact = learner | {"exact_every": 2}
                todo[f"{kind}{stage} exact"] = job(path, here, 3, exact, age=1)
                todo[f"{kind}{stage} aged"] = job(path, here, 3, learner, age=1)
    todo["fills up"] = job(model, folder / "fills up", 2, {"zero_stage": 2}, save=[1, 2], fills_up=20_000)
    for precision in ("float32", "bfloat16"):
        learner = {"zero_stage": 3, "dtype": precision, "algorithm": {"kl_coef": 0.1}}
        todo[f"{precision} in pieces"] = job(model, folder / precision, 2, learner, save=[2])
        todo[f"{precision} whole"] = job(model, folder / precision, 2, learner, whole=True)
    return run_ranks(2, todo, folder) | {"folder": folder}


def checkpoints(folder: Path) -> Path:
    return folder / "default" / "checkpoints"


def names(folder: Path) -> set[str]:
    return {path.name for path in checkpoints(folder).iterdir()}


def test_training_raises_the_likelihood_of_what_is_praised(alone):
    # E[log pi_rollout - log pi] over the same tokens: falls as the policy comes to favour them.
    gaps = [metrics["rollout_corr/kl"] for metrics in alone["praised"]["metrics"]]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[0] - gaps[-1] > 0.1


@pytest.mark.parametrize("kind", ["", "bf16 "])
def test_a_resumed_run_has_the_weights_of_one_that_never_stopped(alone, kind):
    assert alone[f"{kind}second half"]["loaded"] == 2
    assert_same_weights(alone[f"{kind}second half"], alone[f"{kind}straight"])


@pytest.mark.parametrize("kind", ["", "mixture "])
@pytest.mark.parametrize("stage", STAGES)
def test_zero_stages_train_and_resume_to_the_same_weights(pair, stage, kind):
    assert pair[f"{kind}{stage} second half"]["loaded"] == 2
    assert_same_weights(pair[f"{kind}{stage} second half"], pair[f"{kind}{stage} straight"])
    assert_same_weights(pair[f"{kind}{stage} straight"], pair[f"{kind}0 straight"], rtol=1e-3)


@pytest.mark.parametrize("kind", ["", "mixture "])
def test_scoring_by_past_versions_leaves_training_as_it_is(pair, kind):
    scored, plain = pair[f"{kind}2 exact"], pair[f"{kind}2 aged"]
    assert_same_weights(scored, plain)
    first, second, third = scored["metrics"]
    assert "exact/scored" not in second
    # Of the first batch, half the tokens are of a version before this process.
    assert 0.0 < first["exact/scored"] < third["exact/scored"] == pytest.approx(1.0 - third["exact/mixed"])
    assert first["exact/staleness_gap"] == 0.0
    assert 0.0 < third["exact/age_1/staleness_gap"] < third["exact/age_2/staleness_gap"]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_models_loaded_in_pieces_are_trained_to_the_same_bits(pair, precision):
    in_pieces, whole = pair[f"{precision} in pieces"], pair[f"{precision} whole"]
    assert_same_weights(in_pieces, whole)
    of_steps = ([step["actor/kl_loss"] for step in run["metrics"]] for run in (in_pieces, whole))
    assert next(of_steps) == next(of_steps)
    exported = checkpoints(pair["folder"] / precision) / "step_2" / "hf"
    for name, weight in AutoModelForCausalLM.from_pretrained(exported, dtype=precision).named_parameters():
        assert torch.equal(weight, whole["weights"][name]), name


def test_bfloat16_trains_in_every_step(model, alone):
    run = alone["bf16 straight"]
    original = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    for name, weight in original.named_parameters():
        assert run["weights"][name].dtype == torch.bfloat16
        assert not torch.equal(run["weights"][name], weight), name
    # Without sharding asked for, the same fp32 accumulation and master weights as with it.
    assert_same_weights(alone["bf16 stage 2"], run, rtol=1e-2)


def test_ledger_mode_measures_how_far_a_step_moved_the_policy(alone):
    assert all(metrics["actor/drift"] > 0 for metrics in alone["drift"]["metrics"])
    assert "actor/drift" not in alone["straight"]["metrics"][0]


def test_a_full_disk_is_an_error_on_all_ranks_and_loses_nothing(pair):
    for stage in STAGES:
        assert "MiB are free; earlier checkpoints are kept" in pair[f"{stage} first half"]["refused"]
        assert names(pair["folder"] / f"stage {stage}") == {"step_2"}
    # While a file is written, and on one rank alone.
    assert pair["fills up"]["refused"].startswith("rank 1: cannot write checkpoint")
    assert names(pair["folder"] / "fills up") == {"step_1", "step_2"}


def test_a_checkpoint_that_names_code_is_refused_and_runs_none(alone, folder):
    assert "cannot be read" in alone["read forged"]["refused"]
    assert not list(folder.glob("*.ran"))


@pytest.mark.parametrize("stage", [0, 3])
def test_the_export_is_a_plain_model_with_the_trained_weights(model, pair, stage):
    step = checkpoints(pair["folder"] / f"stage {stage}") / "step_2"
    assert json.loads((step / "checkpoint.json").read_text())["version"] == 2
    assert len({file.stat().st_mode for file in (step / "hf").iterdir()}) == 1
    exported, original = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (step / "hf", model)
    )
    assert exported.lm_head.weight is exported.model.embed_tokens.weight
    ids = torch.arange(12)[None]
    assert exported(ids).logits.shape == original(ids).logits.shape
    assert not torch.equal(exported(ids).logits, original(ids).logits)


@pytest.mark.parametrize("stage", [0, 3])
def test_the_export_of_a_mixture_is_named_as_its_files_are(mixture, pair, stage):
    step = checkpoints(pair["folder"] / f"mixture stage {stage}") / "step_2"
    exported, original = (load_file(Path(folder, "model.safetensors")) for folder in (step / "hf", mixture))
    assert {name: weight.shape for name, weight in exported.items()} == {
        name: weight.shape for name, weight in original.items()
    }
    trained = pair[f"mixture {stage} first half"]["weights"]
    assert all(torch.equal(exported[name], weight) for name, weight in trained.items())
    loaded = dict(AutoModelForCausalLM.from_pretrained(step / "hf").named_parameters())
    # A layer's experts are one tensor, in which each expert's gate comes before its other half.
    gates = loaded["model.layers.1.mlp.experts.gate_up_proj"].chunk(2, dim=1)[0]
    assert torch.equal(gates[5], trained["model.layers.1.mlp.experts.5.gate_proj.weight"])
