"""Corrections, losses and proximal policies in the learner: packed, in micro-batches, on two ranks.

Expected gradients are those of the plain learner in tests/support/learner_reference.py, which divides by what is left
where the real one learns only at the end what that is.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from learner.losses import LOSSES
from tests.support.learner import JOB, job_batch, learner_config, make_batch, run_ranks, save_tiny_model
from tests.support.learner_reference import Gradients, assert_close_gradients, plain_training

pytestmark = pytest.mark.integration

START = 3
BUDGET = 100
MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
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
TWO_STEPS = {"mini_batches": 2, "lr": 1.0, "deepspeed": {"optimizer": {"type": "SGD", "params": {"lr": 1.0}}}}


def algorithms(other: str) -> dict[str, dict[str, Any]]:
    """One optimizer step of each, from the same weights; `other` is another model."""
    found: dict[str, dict[str, Any]] = {
        f"loss {name}": {"loss": name, "proximal": "rollout", "correction": SOME_ROWS} for name in LOSSES
    }
    found |= {f"left {mode}": {"aggregation": mode, "correction": SOME_OF_BOTH} for mode in MODES}
    found |= {
        f"skyrl {mode}": {"aggregation": mode, "correction": {"skyrl": SKYRL}}
        for mode in ("token-mean", "seq-mean-token-mean")
    }
    found |= {
        f"normalised {level}": {"correction": {**SOME_OF_BOTH, "rollout_is": level, "rollout_is_batch_normalize": True}}
        for level in ("token", "sequence")
    }
    penalties = {"entropy_coef": 0.3, "kl_coef": 0.5, "kl_estimator": "k2", "reference": other}
    return found | {
        "penalties": {**penalties, "correction": SOME_OF_BOTH},
        "sure negatives": {"negative_max_prob": 0.01, "correction": SOME_ROWS},
        "by age": {"correction": {**SOME_TOKENS, "thresholds_by_age": [1.0, 0.4, 1.0, 1.0, 1.0]}},
        "policy gradient": {
            "correction": {"preset": "bypass_pg_geo_rs_seq_tis", "rollout_rs_threshold": "0.7_1.5"},
            "aggregation": "seq-mean-token-mean",
        },
    }


def job(model: str, learner: dict[str, Any] | None = None, **others: Any) -> dict[str, Any]:
    algorithm = others.pop("algorithm", {})
    section = {"token_budget": BUDGET, "algorithm": algorithm, **(learner or {})}
    return {**JOB, "model": model, "start": START, "steps": START + 1, "learner": section, **others}


def share_of(model: str, rank: int) -> list[int]:
    """The samples of the batch that this one of two ranks gets."""
    payloads, _ = job_batch(job(model), START)
    config = learner_config(model, ".", token_budget=BUDGET)
    batch = make_batch(config, payloads, [float(index) for index in range(len(payloads))], rank=rank, ranks=2)
    return sorted({int(value) for micro in batch.mini_batches[0] for value in micro.advantages})


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("other"), seed=1)


@pytest.fixture(scope="module")
def todo(model: str, other: str) -> dict[str, dict[str, Any]]:
    """Jobs by name; those that take steps do so with plain SGD, as the reference does."""
    only = {"gradients_only": True}
    found = {name: job(model, algorithm=fields, **only) for name, fields in algorithms(other).items()}
    for proximal in ("recompute", "interpolate", "compare"):
        algorithm = {"proximal": proximal, "correction": SOME_OF_BOTH, "clip_low": 0.02, "clip_high": 0.02}
        found[f"two steps, {proximal}"] = job(model, TWO_STEPS, algorithm=algorithm, watch=True)
        found[f"stale, {proximal}"] = job(model, algorithm=algorithm, age=2, **only)
    for level in ("token", "sequence"):
        correction = {**SOME_OF_BOTH, "rollout_is": level, "rollout_is_batch_normalize": True}
        found[f"two steps, {level} weights normalised"] = job(
            model, TWO_STEPS, algorithm={"correction": correction}, watch=True
        )
    lost = {"correction": SOME_ROWS, "proximal": "recompute"}
    found |= {
        f"all of rank {rank} lost": job(model, algorithm=lost, far={str(START): share_of(model, rank)}, **only)
        for rank in (0, 1)
    }
    for scaling in ("none", "sqrt", "linear"):
        algorithm = {"ess_lr": scaling, "correction": SOME_OF_BOTH}
        found[f"scaled {scaling}"] = job(model, algorithm=algorithm, steps=START + 2)
    return found


@pytest.fixture(scope="module")
def pair(todo: dict[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_ranks(2, todo, tmp_path_factory.mktemp("pair"))


def expected(todo: dict[str, Any], name: str) -> tuple[list[Gradients], Gradients]:
    """Plainly computed: the gradient of every optimizer step, and the weights after the last."""
    wanted = todo[name]
    config = learner_config(wanted["model"], Path("unused"), **wanted["learner"])
    gradients, policy = plain_training(config, {START: job_batch(wanted, START)})
    return gradients, {key: parameter.detach() for key, parameter in policy.named_parameters()}


def told(found: dict[str, Any], name: str) -> float:
    return found["metrics"][0][f"rollout_corr/{name}"]


@pytest.mark.parametrize("name", algorithms("unused"))
def test_gradients_are_those_of_one_plain_loss_on_padded_rows(todo, pair, name):
    assert_close_gradients(pair[name]["gradients"], expected(todo, name)[0][0])


@pytest.mark.parametrize("proximal", ["recompute", "interpolate", "compare"])
def test_gradients_of_every_step_of_a_batch_have_the_right_proximal_policy(todo, pair, proximal):
    name = f"two steps, {proximal}"
    (first, second), weights = expected(todo, name)
    assert len(pair[name]["watched"]) == 2
    assert_close_gradients(pair[name]["watched"][0], first)
    # The second is taken from weights that the first has moved, in both.
    assert_close_gradients(pair[name]["watched"][1], second, 1e-4)
    for key, gradient in first.items():
        assert (pair[name]["weights"][key] - weights[key]).norm() <= 1e-4 * gradient.norm(), key
    assert pair[name]["metrics"][0]["actor/pg_clipfrac"] > 0


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_are_divided_by_their_mean_over_the_batch_and_not_over_a_mini_batch(todo, pair, level):
    name = f"two steps, {level} weights normalised"
    first, second = expected(todo, name)[0]
    assert_close_gradients(pair[name]["watched"][0], first)
    assert_close_gradients(pair[name]["watched"][1], second, 1e-4)


def test_before_the_first_step_stale_tokens_are_learned_from_as_if_recomputed(pair):
    recomputed = pair["stale, recompute"]
    for proximal in ("interpolate", "compare"):
        assert_close_gradients(pair[f"stale, {proximal}"]["gradients"], recomputed["gradients"])
        for name, value in recomputed["metrics"][0].items():
            if name.startswith(("rollout_corr/", "actor/")):
                found = pair[f"stale, {proximal}"]["metrics"][0][name]
                assert found == pytest.approx(value, rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_whose_tokens_are_all_rejected_takes_part_and_contributes_nothing(todo, pair, rank):
    name = f"all of rank {rank} lost"
    lost = todo[name]["far"][str(START)]
    assert 0 < len(lost) < JOB["samples"]
    assert_close_gradients(pair[name]["gradients"], expected(todo, name)[0][0])
    assert told(pair[name], "seq_masked_fraction") >= len(lost) / JOB["samples"]


@pytest.mark.parametrize("scaling", ["none", "sqrt", "linear"])
def test_the_learning_rate_is_scaled_by_the_effective_sample_size(pair, scaling):
    for metrics in pair[f"scaled {scaling}"]["metrics"]:
        share = metrics["rollout_corr/eff_sample_size"]
        assert 0 < share < 0.95
        scale = {"none": 1.0, "sqrt": math.sqrt(share), "linear": share}[scaling]
        assert metrics["actor/lr"] == pytest.approx(1e-3 * scale)


def test_a_scaled_learning_rate_moves_the_weights_by_as_much(pair):
    steps = {name: pair[f"scaled {name}"] for name in ("none", "linear")}
    assert any(
        not torch.equal(steps["none"]["weights"][name], steps["linear"]["weights"][name])
        for name in steps["none"]["weights"]
    )
