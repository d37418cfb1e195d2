"""Rejection and the optimizer: the same step in every ZeRO stage, and no step where nothing is left.

What a gradient is divided by is known only when its last micro-batch has been seen, so a factor meets it on the
way into the optimizer (learner.engine.GradientFactor), beside the clipping of its norm.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.learner import JOB, run_ranks

pytestmark = [pytest.mark.integration, pytest.mark.slow]

STAGES = (0, 1, 2, 3)
# The stages, with the optimizer's state elsewhere, and in the precision of real runs.
KINDS: dict[str, dict[str, Any]] = {
    **{f"stage {stage}": {"zero_stage": stage} for stage in STAGES},
    "stage 2, offloaded": {"zero_stage": 2, "offload_optimizer": True},
    "stage 3, offloaded": {"zero_stage": 3, "offload_optimizer": True, "offload_params": True},
}
BF16 = {"bf16 stage 0": {"dtype": "bfloat16"}, "bf16 stage 2": {"dtype": "bfloat16", "zero_stage": 2}}
SOME_OF_BOTH = {"rollout_is": "token", "rollout_rs": "token_k1,seq_mean_k1", "rollout_rs_threshold": "0.5_1.8,0.7_1.5"}
PENALTIES = {"entropy_coef": 0.1, "kl_coef": 0.1}
REJECTING = {"correction": SOME_OF_BOTH, "aggregation": "token-mean"}
# Adam divides the gradient by its own size, which would hide a wrong scale; with this epsilon it does not.
BLUNT = {"lr": 1.0, "eps": 1.0, "betas": [0.5, 0.9], "torch_adam": True, "fused": True}
SCALED = {"lr": 1.0, "deepspeed": {"optimizer": {"type": "AdamW", "params": BLUNT}}}
# The gradients' norms are between these (asserted below): the one always clips, the other never.
CLIPS = {"clipped": 0.2, "free": 50.0}


def job(model: str, learner: dict[str, Any], **others: Any) -> dict[str, Any]:
    section = {"token_budget": 100, "algorithm": REJECTING, **learner}
    return {**JOB, "model": model, "steps": 2, "learner": section, **others}


def lost(model: str, learner: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Three batches of which the second is all rejected, and the same without the second."""
    learner = {"grad_clip": 0.5, **learner}
    return {
        "lost": job(model, learner, steps=3, far={"1": "all"}),
        "never seen": job(model, learner, steps=3, skip=[1]),
    }


@pytest.fixture(scope="module")
def pair(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    todo = {}
    for kind, learner in (KINDS | BF16).items():
        todo |= {f"{kind}, {name}": found for name, found in lost(model, learner).items()}
        for clip, limit in CLIPS.items():
            todo[f"{kind}, {clip}"] = job(model, {**learner, **SCALED, "grad_clip": limit})
    return run_ranks(2, todo, tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def alone(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One rank without ZeRO, which is torch's own optimizer and clipping on whole gradients."""
    todo = {clip: job(model, {**SCALED, "grad_clip": limit}) for clip, limit in CLIPS.items()}
    # All of a batch in one micro-batch, two mini-batches of which the second is rejected.
    half = {"1": list(range(JOB["samples"] // 2, JOB["samples"]))}
    todo["half lost"] = job(model, {"mini_batches": 2, "token_budget": 4096}, far=half)
    for kind, learner in (("whole", {"token_budget": 4096}), ("penalised", {"algorithm": {**REJECTING, **PENALTIES}})):
        todo |= {f"{kind}, {name}": found for name, found in lost(model, learner).items()}
    return run_ranks(1, todo, tmp_path_factory.mktemp("alone"))


def moved(model: str, found: dict[str, Any]) -> dict[str, torch.Tensor]:
    """By how much training changed each weight."""
    original = dict(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).named_parameters())
    return {name: weight.float() - original[name].detach() for name, weight in found["weights"].items()}


def assert_moved_alike(model: str, found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    changes = moved(model, found)
    for name, change in moved(model, expected).items():
        assert change.norm() > 0, name
        assert (changes[name] - change).norm() <= tolerance * change.norm(), name


def assert_same_weights(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, weight in expected["weights"].items():
        assert torch.equal(found["weights"][name], weight), name


def norms(found: dict[str, Any]) -> list[float]:
    return [metrics["actor/grad_norm"] for metrics in found["metrics"]]


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_after_rejection_is_the_same_in_every_stage(model, alone, pair, kind, clip):
    found, expected = pair[f"{kind}, {clip}"], alone[clip]
    assert_moved_alike(model, found, expected, 1e-5)
    assert norms(found) == pytest.approx(norms(expected), rel=1e-5)


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("kind", BF16)
def test_in_bfloat16_a_step_after_rejection_is_close_to_that(model, alone, pair, kind, clip):
    found, expected = pair[f"{kind}, {clip}"], alone[clip]
    assert norms(found) == pytest.approx(norms(expected), rel=0.1)
    assert_moved_alike(model, found, expected, 0.25)


def test_the_steps_are_clipped_or_not_and_a_factor_was_needed(model, alone):
    assert all(norm > 3 * CLIPS["clipped"] for norm in norms(alone["clipped"]))
    assert all(norm < CLIPS["free"] / 3 for norm in norms(alone["free"]))
    for clip in CLIPS:
        assert all(0.2 < metrics["rollout_corr/masked_fraction"] < 0.9 for metrics in alone[clip]["metrics"])
    change = torch.cat([change.flatten() for change in moved(model, alone["clipped"]).values()]).norm()
    other = torch.cat([change.flatten() for change in moved(model, alone["free"]).values()]).norm()
    assert change < other / 2


@pytest.mark.parametrize("kind", [*KINDS, *BF16])
def test_a_batch_of_which_nothing_is_left_leaves_no_trace_in_weights_or_optimizer(pair, kind):
    found, expected = pair[f"{kind}, lost"], pair[f"{kind}, never seen"]
    # Equal after the step that follows, which the optimizer's state and any stale gradient would have shown in.
    assert_same_weights(found, expected)
    assert [metrics["actor/skipped_steps"] for metrics in found["metrics"]] == [0, 1, 0]
    assert found["metrics"][2]["actor/grad_norm"] == expected["metrics"][1]["actor/grad_norm"] > 0


@pytest.mark.parametrize("kind", ["whole", "penalised"])
def test_so_it_is_in_one_micro_batch_and_with_penalties(alone, kind):
    assert_same_weights(alone[f"{kind}, lost"], alone[f"{kind}, never seen"])
    assert alone[f"{kind}, lost"]["metrics"][1]["actor/skipped_steps"] == 1


@pytest.mark.parametrize("kind", ["stage 0", "stage 3", "bf16 stage 0"])
def test_a_skipped_step_says_so_in_its_metrics_and_in_a_warning(pair, kind):
    skipped, warnings = pair[f"{kind}, lost"]["metrics"][1], pair[f"{kind}, lost"]["warnings"]
    assert [(entry["version"], entry["mini_batch"]) for entry in warnings] == [(1, 0)]
    assert warnings[0]["event"] == "all tokens rejected, optimizer step skipped"
    assert pair[f"{kind}, never seen"]["warnings"] == []
    assert skipped["rollout_corr/masked_fraction"] == 1
    for name in ("actor/lr", "actor/grad_norm", "actor/pg_loss", "actor/loss", "rollout_corr/eff_sample_size"):
        assert skipped[name] == 0, name


def test_a_mini_batch_of_which_nothing_is_left_does_not_stop_the_others(alone):
    first, second = alone["half lost"]["metrics"]
    assert first["actor/skipped_steps"] == 0
    assert second["actor/skipped_steps"] == 1
    assert second["actor/grad_norm"] > 0
    assert second["actor/lr"] > 0
    assert 0.4 < second["rollout_corr/masked_fraction"] < 0.95
