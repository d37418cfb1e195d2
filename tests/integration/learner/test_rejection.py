"""Rejection and the optimizer: the same step in every ZeRO stage, and no step where nothing is left.

What a gradient is divided by is known only when its last micro-batch has been seen, so a factor meets it on the
way into the optimizer (learner.policy.engine.GradientFactor), beside the clipping of its norm.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.learner import JOB, assert_same_weights, run_ranks

pytestmark = pytest.mark.slow

# The stages, with the optimizer's state elsewhere, and in the precision of real runs.
KINDS: dict[str, dict[str, Any]] = {
    **{f"stage {stage}": {"zero_stage": stage} for stage in (0, 2)},
    "stage 3, offloaded": {"zero_stage": 3, "offload": "all"},
    "bf16 stage 2": {"dtype": "bfloat16", "zero_stage": 2},
}
SOME_OF_BOTH = {"rollout_is": "token", "rollout_rs": "token_k1,seq_mean_k1", "rollout_rs_threshold": "0.5_1.8,0.7_1.5"}
REJECTING = {"correction": SOME_OF_BOTH, "aggregation": "token-mean"}
# Adam divides the gradient by its own size, which would hide a wrong scale; with this epsilon it does not.
BLUNT = {"lr": 1.0, "eps": 1.0, "betas": [0.5, 0.9], "torch_adam": True, "fused": True}
SCALED = {"lr": 1.0, "deepspeed": {"optimizer": {"type": "AdamW", "params": BLUNT}}}
# The gradients' norms are between these (asserted below): the one always clips, the other never.
CLIPS = {"clipped": 0.2, "free": 50.0}
# Of the second of three batches.
FATES: dict[str, Any] = {
    "lost": {"far": {"1": "all"}},
    "not finite": {"infinite": {"1": [3]}},
    "never seen": {"skip": [1]},
}
# Of one rank, with penalties.
OTHERS: dict[str, dict[str, Any]] = {"penalised": {"algorithm": {**REJECTING, "entropy_coef": 0.1, "kl_coef": 0.1}}}


def jobs(model: str, kinds: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Three steps of which the second is all rejected or not finite, or is none, and two steps, clipped or not."""

    def job(learner: dict[str, Any], **others: Any) -> dict[str, Any]:
        section = {"token_budget": 100, "algorithm": REJECTING, "grad_clip": 0.5, **learner}
        return {"model": model, "steps": 2, "learner": section, **others}

    todo = {}
    for kind, learner in kinds.items():
        for fate, batch in FATES.items():
            todo[f"{kind}, {fate}"] = job(learner, steps=3, **batch)
    steps = kinds if kinds is KINDS else {"": {}}
    for kind, learner in steps.items():
        for clip, limit in CLIPS.items():
            todo[f"{kind}, {clip}" if kind else clip] = job({**learner, **SCALED, "grad_clip": limit})
    # Two mini-batches of which the second is rejected.
    half = {"1": list(range(JOB["samples"] // 2, JOB["samples"]))}
    return todo | {"half lost": job({"mini_batches": 2, "token_budget": 4096, "grad_clip": 0.0}, far=half)}


@pytest.fixture(scope="module")
def runs(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One rank without ZeRO is torch's own optimizer and clipping on whole gradients."""
    pair = run_ranks(2, jobs(model, KINDS), tmp_path_factory.mktemp("pair"))
    return pair | run_ranks(1, jobs(model, OTHERS), tmp_path_factory.mktemp("alone"))


def moved(model: str, run: dict[str, Any]) -> dict[str, torch.Tensor]:
    """By how much training changed each weight."""
    original = dict(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).named_parameters())
    return {name: weight.float() - original[name].detach() for name, weight in run["weights"].items()}


def norms(run: dict[str, Any]) -> list[float]:
    return [metrics["actor/grad_norm"] for metrics in run["metrics"]]


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_after_rejection_is_the_same_in_every_stage(model, runs, kind, clip):
    run, expected = runs[f"{kind}, {clip}"], runs[clip]
    of_norms, of_weights = (0.1, 0.25) if kind.startswith("bf16") else (1e-5, 1e-5)
    assert norms(run) == pytest.approx(norms(expected), rel=of_norms)
    changes = moved(model, run)
    for name, change in moved(model, expected).items():
        assert change.norm() > 0, name
        assert (changes[name] - change).norm() <= of_weights * change.norm(), name


def test_the_steps_are_clipped_or_not_and_a_factor_was_needed(model, runs):
    assert all(norm > 3 * CLIPS["clipped"] for norm in norms(runs["clipped"]))
    assert all(norm < CLIPS["free"] / 3 for norm in norms(runs["free"]))
    for clip in CLIPS:
        assert all(0.2 < metrics["rollout_corr/masked_fraction"] < 0.9 for metrics in runs[clip]["metrics"])
    clipped, free = (torch.cat([change.flatten() for change in moved(model, runs[clip]).values()]) for clip in CLIPS)
    assert clipped.norm() < free.norm() / 2


@pytest.mark.parametrize("fate", ["lost", "not finite"])
@pytest.mark.parametrize("kind", [*KINDS, *OTHERS])
def test_a_batch_that_is_all_rejected_or_not_finite_leaves_no_trace(runs, kind, fate):
    """Not finite is the loss of one sample, on one rank, whose other micro-batches have gradients by then."""
    run, expected = runs[f"{kind}, {fate}"], runs[f"{kind}, never seen"]
    # Equal after the step that follows, which the optimizer's state and any stale gradient would have shown in.
    assert_same_weights(run, expected)
    assert [metrics["actor/skipped_steps"] for metrics in run["metrics"]] == [0, 1, 0]
    assert expected["warnings"] == []
    if fate == "not finite":
        assert [entry["event"].partition(",")[0] for entry in run["warnings"]] == ["loss or gradient not finite"]
        return
    assert run["metrics"][2]["actor/grad_norm"] == expected["metrics"][1]["actor/grad_norm"] > 0
    assert [(entry["version"], entry["mini_batch"]) for entry in run["warnings"]] == [(1, 0)]
    skipped = run["metrics"][1]
    assert skipped["rollout_corr/masked_fraction"] == 1
    for name in ("actor/lr", "actor/grad_norm", "actor/pg_loss", "rollout_corr/eff_sample_size"):
        assert skipped[name] == 0, name


def test_a_mini_batch_all_rejected_does_not_stop_the_others(runs):
    first, second = runs["half lost"]["metrics"]
    assert (first["actor/skipped_steps"], second["actor/skipped_steps"]) == (0, 1)
    assert second["actor/grad_norm"] > 0
    assert second["actor/lr"] > 0
    assert 0.4 < second["rollout_corr/masked_fraction"] < 0.95
