"""Ranks that divide sequences among them, or share replayed experts, train as one rank does that has them whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.families import save_tiny
from tests.support.learner import JOB, assert_same_weights, run_ranks, save_tiny_model
from tests.support.learner_reference import Gradients

pytestmark = pytest.mark.slow

Job = dict[str, Any]
LORA = {"rank": 4, "alpha": 8}
SOME = {"rollout_is": "sequence", "rollout_rs": "token_k1,seq_mean_k1", "rollout_rs_threshold": "0.5_1.8,0.7_1.5"}
MODES = ("seq-mean-token-sum", "seq-mean-token-mean")
COMPARED = {"loss": "kl_cov", "loss_options": {"ratio": 0.3}, "correction": {"m2_threshold": 0.1}}
# Settings of the learner, and what the batch is. The model's 4 heads of queries have 2 of keys, so 4 ranks share them.
CASES: dict[str, tuple[Job, Job]] = {
    **{f"stage {stage}": ({"zero_stage": stage}, {}) for stage in (0, 3)},
    **{mode: ({"zero_stage": 2, "algorithm": {"aggregation": mode}}, {"rows": True}) for mode in MODES},
    "adapter in pieces": ({"zero_stage": 3, "lora": LORA}, {}),
    "rejection": ({"zero_stage": 1, "algorithm": {"correction": SOME, "loss": "gspo"}}, {"start": 3, "steps": 4}),
    "all tokens compared": ({"zero_stage": 2, "algorithm": COMPARED}, {"start": 3, "steps": 4}),
    "penalties": (
        {"zero_stage": 3, "algorithm": {"kl_coef": 0.5, "entropy_coef": 0.3}, "gradient_checkpointing": True},
        {},
    ),
    "likeliest tokens": (
        {"zero_stage": 3, "teacher": {"model": "t", "form": "loss", "top_k": 4}, "gradient_checkpointing": True},
        {"taught": 4},
    ),
    "shorter than the ranks": ({"zero_stage": 2, "token_budget": 8}, {"samples": 5, "lengths": [3, 4]}),
    "balanced experts": ({"zero_stage": 3, "router_balance": 0.5}, {"samples": 1}),
    "replayed experts": (
        {"zero_stage": 2, "router_replay": "rollout", "gradient_checkpointing": True},
        {"experts": [2, 2, 8]},
    ),
    "sinks": ({"zero_stage": 1}, {}),
}
MIXTURES = {"balanced experts": "Qwen3-MoE", "replayed experts": "Qwen3-MoE", "sinks": "gpt-oss"}
# They depend on the clock, and on how tokens are divided into micro-batches.
OWN = ("tokens/per_second", "router/balance")
RANKS = 4


# The metrics that are the same for the one micro-batch that is all and for micro-batches of 100 tokens.
ROUTED = ("load_max", "load_min", "entropy", "replayed", "differs")


def routed(**learner: Any) -> tuple[Job, Job]:
    """A case in which experts are replayed."""
    section = {"router_replay": "rollout", "router_balance": 0.0, "token_budget": 4096}
    return section | learner, {"experts": [2, 2, 8], "samples": 8}


ROUTED_ALONE = {
    "experts": routed(),
    "experts of parts": routed(token_budget=100),
    "experts computed again": routed(gradient_checkpointing=True),
    "own experts": routed(router_replay="none"),
    "balanced": routed(router_balance=0.5),
}
STAGED = {f"experts, stage {stage}": routed(zero_stage=stage, token_budget=100) for stage in range(4)}
SAME = ("experts of parts", "experts computed again", *STAGED)
BALANCED = {"balanced, stage 3": routed(router_balance=0.5, zero_stage=3, gradient_checkpointing=True)}


@pytest.fixture(scope="module")
def results(model, tmp_path_factory):
    """What each case leaves, by the number of ranks, its name and how many ranks divide a sequence."""
    folder = tmp_path_factory.mktemp("sequences")
    other = save_tiny_model(folder / "other", seed=1)
    for family in set(MIXTURES.values()):
        save_tiny(folder / family, family, num_attention_heads=4, num_key_value_heads=2)

    def job(name: str, size: int, case: tuple[Job, Job]) -> Job:
        learner, batch = case
        settings = {"token_budget": 100, "sequence_parallel": size} | learner
        if "kl_coef" in settings.get("algorithm", {}):
            settings["algorithm"] = settings["algorithm"] | {"reference": other}
        family = MIXTURES.get(name, "Qwen3-MoE" if "router_replay" in learner else None)
        path = str(folder / family) if family else model
        return {**JOB, "model": path, "learner": settings, "gradients_only": True, **batch}

    def jobs(size: int, cases: dict[str, tuple[Job, Job]]) -> dict[str, Job]:
        return {f"{name} by {size}": job(name, size, case) for name, case in cases.items()}

    todo = {1: jobs(1, CASES | ROUTED_ALONE), 2: jobs(1, STAGED | BALANCED), RANKS: jobs(4, CASES) | jobs(2, CASES)}
    for ranks in todo:
        (folder / str(ranks)).mkdir()
    return {ranks: run_ranks(ranks, todo[ranks], folder / str(ranks)) for ranks in todo}


def assert_near(gradients: Gradients, expected: Gradients, tolerance: float) -> None:
    """Gradients differ by at most this share of the largest."""
    assert gradients.keys() == expected.keys()
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    assert scale > 0
    for name, gradient in expected.items():
        assert (gradients[name] - gradient).abs().max() <= tolerance * scale, name


@pytest.mark.parametrize("size", [4, 2])
@pytest.mark.parametrize("name", CASES)
def test_gradients_and_metrics_are_those_of_one_rank(results, name, size):
    expected, actual = results[1][f"{name} by 1"], results[RANKS][f"{name} by {size}"]
    assert_near(actual["gradients"], expected["gradients"], 1e-6)
    metrics = {key: value for key, value in expected["metrics"][0].items() if key not in OWN}
    assert {key: actual["metrics"][0][key] for key in metrics} == pytest.approx(metrics, rel=1e-4, abs=1e-6)


def test_ranks_and_micro_batches_replay_the_same_experts(results):
    others = {name.removesuffix(" by 1"): run for name, run in (results[1] | results[2]).items()}
    whole = others["experts"]
    for name in SAME:
        assert_near(others[name]["gradients"], whole["gradients"], 1e-5)
        for metric in (f"router/{name}" for name in ROUTED):
            assert others[name]["metrics"][0][metric] == pytest.approx(whole["metrics"][0][metric], rel=1e-4), metric
    assert whole["metrics"][0]["router/replayed"] == 1
    assert whole["metrics"][0]["router/differs"] > 0.5
    assert "router/differs" not in others["own experts"]["metrics"][0]
    gate = "model.layers.0.mlp.gate.weight"
    assert not torch.allclose(others["own experts"]["gradients"][gate], whole["gradients"][gate], rtol=0.1)
    # The two ranks have a half of the tokens each, of which each takes its own shares of experts.
    balanced, divided = (
        (others[name]["gradients"][gate] - whole["gradients"][gate]) for name in ("balanced", "balanced, stage 3")
    )
    assert balanced.abs().max() > 1e-4
    assert torch.nn.functional.cosine_similarity(balanced.flatten(), divided.flatten(), dim=0) > 0.9


def test_a_checkpoint_is_continued_with_another_division(model, tmp_path):
    def job(size: int, **others: Any) -> Job:
        learner = {"zero_stage": 2, "grad_clip": 0.5, "sequence_parallel": size}
        return {"model": model, "folder": str(tmp_path / "run"), "steps": 4, "learner": learner} | others

    jobs = {"written": job(2, begin=2), "same": job(2, load=True), "whole": job(1, load=True)}
    left = run_ranks(2, jobs, tmp_path)
    assert left["same"]["loaded"] == left["whole"]["loaded"] == 2
    assert_same_weights(left["same"], left["written"])
    assert_same_weights(left["whole"], left["written"], rtol=1e-3)
