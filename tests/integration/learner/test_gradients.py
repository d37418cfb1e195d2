"""The gradient is that of one plain loss, however the batch is corrected, packed, split and spread over ranks.

Expected gradients are those of tests/support/learner_reference.py, which divides by what is left where the learner
learns only at the end what that is.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.families import save_tiny
from tests.support.learner import NOTHING_KEPT, job_batch, learner_config, make_batch, run_ranks, save_tiny_model
from tests.support.learner_reference import Gradients, assert_close_gradients, plain_training

START = 3
LATER = {"start": START, "steps": START + 1}
Job = dict[str, Any]
BATCH: Job = {"samples": 8, "seed": 3, "steps": 1}
# Each drops some tokens, some rows, or both; of the batch below, never all.
SOME_ROWS = {"rollout_is": "token", "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.7_1.5"}
SOME_TOKENS = {"rollout_is": "token", "rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_1.8"}
SOME_OF_BOTH = {"rollout_is": "token", "rollout_rs": "token_k1,seq_mean_k1", "rollout_rs_threshold": "0.5_1.8,0.7_1.5"}
SKYRL = {
    "tis_ratio_type": "sequence",
    "token_mask_is_threshold_low": 0.5,
    "token_mask_is_threshold_high": 1.8,
    "sequence_mask_metric": "geometric",
    "geo_mask_low": 0.7,
    "geo_mask_high": 1.5,
}
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 1.0}}, "zero_allow_untested_optimizer": True}
PLAIN_SGD = {"lr": 1.0, "deepspeed": SGD}
GATHERED = PLAIN_SGD | {"deepspeed": SGD | NOTHING_KEPT}
UNEVEN = 6  # the seed of a batch whose rows make two padded groups on one rank, and one on the other
TWO_STEPS = {"mini_batches": 2, **PLAIN_SGD}
PENALTIES = {"entropy_coef": 0.3, "kl_coef": 0.5, "kl_estimator": "k2"}
GEOMETRIC = {"preset": "bypass_pg_geo_rs_seq_tis", "rollout_rs_threshold": "0.7_1.5"}
DRAWN = {"ratio": 0.3, "cov_low": -9.0, "cov_high": 9.0}
# Every kind of loss and of correction, the first optimizer step of each.
ALGORITHMS: dict[str, Job] = {
    "ppo_clip": {"correction": SOME_OF_BOTH},
    "gspo": {"loss": "gspo", "aggregation": "seq-mean-token-mean", "correction": SOME_OF_BOTH},
    "double_sided": {"loss": "double_sided", "proximal": "rollout", "correction": SOME_ROWS},
    "clip_cov": {"loss": "clip_cov", "loss_options": DRAWN, "proximal": "rollout", "correction": SOME_ROWS},
    "second moment": {"correction": {"m2_threshold": 0.1}},
    "policy gradient": {"correction": GEOMETRIC, "aggregation": "seq-mean-token-mean"},
    "skyrl by row": {"correction": {"skyrl": SKYRL}, "aggregation": "seq-mean-token-mean"},
    "penalties": {**PENALTIES, "correction": SOME_OF_BOTH},
    "sure negatives": {"negative_max_prob": 0.01, "correction": SOME_ROWS},
    "demonstrations": {
        "correction": SOME_OF_BOTH,
        "demonstrations": {"data": "rows.jsonl", "batch_size": 7, "weight": 0.5, "decay_steps": 12},
    },
    "by age": {"correction": {**SOME_TOKENS, "thresholds_by_age": [1.0, 0.4, 1.0, 1.0, 1.0]}},
}
NARROW = {"correction": SOME_OF_BOTH, "loss_options": {"low": 0.02, "high": 0.02}}
# Both optimizer steps of a batch; weights are divided by their mean over the batch, not over a mini-batch.
IN_TWO_STEPS: dict[str, Job] = {
    "interpolate": {"proximal": "interpolate", **NARROW},
    "token": NARROW | {"correction": {**SOME_OF_BOTH, "rollout_is_batch_normalize": True}},
}
# Settings of a teacher that scores every second sample.
TEACHERS: dict[str, Job] = {
    "taught advantage": {"weight": 0.5},
    "taught loss": {"weight": 0.5, "form": "loss", "decay_steps": 12, "reward": False},
    "taught rows": {"weight": 0.5, "form": "loss", "top_k": 3},
}
# On one rank; all but the last are the same gradient.
ALONE: dict[str, Job] = {
    "packed": {"token_budget": 4096},
    "quarters": {"token_budget": 130},
    "recomputed": {"token_budget": 4096, "gradient_checkpointing": True},
    "turns": {"algorithm": {"correction": {"preset": "disabled"}}},
}
# Of samples of several rows, each of which counts once wherever its rows lie.
ROWS = {f"rows {mode}": mode for mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")}
STAGES = (0, 2, 3)
HPZ = "3, with a second copy of the weights within a machine"
SECOND_COPY = {"zero_optimization": {"zero_hpz_partition_size": 2, **NOTHING_KEPT["zero_optimization"]}}
# Settings that change how a gradient is computed, but not the gradient.
DIVISION = ("token_budget", "zero_stage", "gradient_checkpointing")


def job(model: str, learner: Job, **others: Any) -> Job:
    return {**BATCH, "model": model, "learner": learner, "gradients_only": True, **others}


def share_of(model: str, rank: int) -> list[int]:
    """The samples of the batch that this one of two ranks gets."""
    payloads, _ = job_batch(BATCH, START)
    config = learner_config(model, ".", token_budget=100)
    batch = make_batch(config, payloads, [float(index) for index in range(len(payloads))], rank=rank, ranks=2)
    return sorted({int(value) for micro in batch.mini_batches[0] for value in micro.advantages})


def staged(kind: str, model: str, budget: int, learner: Job = PLAIN_SGD, **batch: Any) -> dict[str, Job]:
    """Steps in every ZeRO stage."""
    sections = {stage: {"token_budget": budget, "zero_stage": stage, **learner} for stage in STAGES}
    taken = {"gradients_only": False, "watch": True} | batch
    return {f"{kind} {stage}": job(model, section, **taken) for stage, section in sections.items()}


def model_jobs(mixture: str, hybrid: str, budget: int) -> dict[str, Job]:
    """Steps of a mixture of experts, and of a model with a state, whose adapter is seen to change in a second step."""
    return (
        staged("mixture", mixture, budget)
        | staged("hybrid", hybrid, budget, GATHERED, seed=UNEVEN)
        | staged("adapter", hybrid, budget, GATHERED | {"lora": {"rank": 4, "alpha": 8}}, seed=UNEVEN, steps=2)
    )


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """A mixture with so many experts that a short batch leaves some without a token."""
    folder = tmp_path_factory.mktemp("mixture")
    save_tiny(folder, "Qwen3-MoE", num_experts=32)
    return str(folder)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """A model of short convolutions and attention."""
    folder = tmp_path_factory.mktemp("hybrid")
    save_tiny(folder, "LFM2")
    return str(folder)


@pytest.fixture(scope="module")
def pair(model, mixture, hybrid, tmp_path_factory):
    """Jobs of two ranks, and what they left; steps are taken with plain SGD, as the reference does."""
    other = save_tiny_model(tmp_path_factory.mktemp("other"), seed=1)
    todo = {}
    for name, fields in ALGORITHMS.items():
        algorithm = fields | ({"reference": other} if "kl_coef" in fields else {})
        todo[name] = job(model, {"token_budget": 100, "algorithm": algorithm}, **LATER)
    for name, teacher in TEACHERS.items():
        rows = name == "taught rows"  # the reference corrects a sample as one row
        section = {"algorithm": {} if rows else {"correction": SOME_OF_BOTH}, "teacher": {"model": "t", **teacher}}
        todo[name] = job(model, {"token_budget": 100} | section, **LATER, taught=teacher.get("top_k", 0), rows=rows)
    for name, algorithm in IN_TWO_STEPS.items():
        section = {"token_budget": 100, "algorithm": algorithm} | TWO_STEPS
        todo[name] = job(model, section, **LATER, gradients_only=False, watch=True)
    section = {"token_budget": 100, "algorithm": {"correction": SOME_ROWS}}
    todo["rank lost"] = job(model, section, **LATER, far={str(START): share_of(model, 1)})
    for name, mode in ROWS.items():
        todo[name] = job(model, {"token_budget": 100, "algorithm": {"aggregation": mode}}, rows=True)
    todo |= {f"stage {stage}": job(model, {"token_budget": 160, "zero_stage": stage}) for stage in STAGES}
    todo[f"stage {HPZ}"] = job(model, {"token_budget": 160, "zero_stage": 3, "deepspeed": SECOND_COPY})
    todo |= {f"lonely mixture {stage}": job(mixture, {"zero_stage": stage}, samples=1) for stage in STAGES}
    return done(2, todo | model_jobs(mixture, hybrid, 160), tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def alone(model, mixture, hybrid, tmp_path_factory):
    """Jobs of one rank, and what they left."""
    todo = {name: job(model, learner, turns=name == "turns") for name, learner in ALONE.items()}
    return done(1, todo | model_jobs(mixture, hybrid, 4096), tmp_path_factory.mktemp("alone"))


def done(ranks: int, jobs: dict[str, Job], folder: Path) -> dict[str, Job]:
    return {name: left | {"job": jobs[name]} for name, left in run_ranks(ranks, jobs, folder).items()}


def expected(run: Job) -> tuple[list[Gradients], Gradients]:
    """Plainly computed: the gradient of every optimizer step, and the weights after the last."""
    learner = {name: value for name, value in run["job"]["learner"].items() if name not in DIVISION}
    return plainly(json.dumps(run["job"] | {"learner": learner}))


@functools.cache
def plainly(job: str) -> tuple[list[Gradients], Gradients]:
    wanted = json.loads(job)
    config, version = learner_config(wanted["model"], "unused", **wanted["learner"]), wanted.get("start", 0)
    return plain_training(config, job_batch(wanted, version), version)


@pytest.mark.parametrize("name", [*ALGORITHMS, *TEACHERS, *ROWS])
def test_ranks_have_the_gradient_of_one_plain_loss(pair, name):
    """In which all model tokens of a sample are in one row."""
    assert_close_gradients(pair[name]["gradients"], expected(pair[name])[0][0])


@pytest.mark.parametrize("name", ALONE)
def test_neither_packing_nor_recomputing_changes_the_gradient(alone, name):
    assert_close_gradients(alone[name]["gradients"], expected(alone[name])[0][0])


@pytest.mark.parametrize("name", IN_TWO_STEPS)
def test_both_steps_of_a_batch_have_the_right_gradients(pair, name):
    run = pair[name]
    (first, second), weights = expected(run)
    assert_close_gradients(run["watched"][0], first)
    # The second is taken from weights that the first has moved, in both.
    assert_close_gradients(run["watched"][1], second, 1e-4)
    for key, gradient in first.items():
        assert (run["weights"][key] - weights[key]).norm() <= 1e-4 * gradient.norm(), key
    assert run["metrics"][0]["actor/pg_clipfrac"] > 0


def test_a_rank_with_all_tokens_rejected_contributes_nothing(pair):
    run = pair["rank lost"]
    lost = len(run["job"]["far"][str(START)])
    assert 0 < lost < BATCH["samples"]
    assert_close_gradients(run["gradients"], expected(run)[0][0])
    assert run["metrics"][0]["rollout_corr/seq_masked_fraction"] >= lost / BATCH["samples"]


@pytest.mark.parametrize("stage", [*STAGES, HPZ])
def test_two_ranks_equal_one_in_every_zero_stage(alone, pair, stage):
    result, whole = pair[f"stage {stage}"], alone["packed"]
    assert_close_gradients(result["gradients"], whole["gradients"])
    metrics = {name: value for name, value in whole["metrics"][0].items() if name != "tokens/per_second"}
    assert {name: result["metrics"][0][name] for name in metrics} == pytest.approx(metrics, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("kind", ["mixture", "hybrid", "adapter"])
@pytest.mark.parametrize("stage", STAGES)
def test_experts_and_layers_with_a_state_take_the_same_step_in_every_zero_stage(alone, pair, kind, stage):
    whole = alone[f"{kind} 0"]
    gradients = whole["gradients"] if kind == "adapter" else expected(whole)[0][0]  # the reference has no adapters
    for run in (alone[f"{kind} {stage}"], pair[f"{kind} {stage}"]):
        assert_close_gradients(run["gradients"], gradients)
        for key, weight in whole["weights"].items():
            torch.testing.assert_close(run["weights"][key], weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_experts_without_a_token_hold_no_rank_up(pair, stage):
    """One of the ranks has no token at all, and the other's leave some experts without one."""
    run = pair[f"lonely mixture {stage}"]
    assert_close_gradients(run["gradients"], expected(run)[0][0])
    of_experts = [gradient.flatten(1).norm(dim=1) for key, gradient in run["gradients"].items() if ".experts." in key]
    assert all((norms == 0).any() and (norms > 0).any() for norms in of_experts)
