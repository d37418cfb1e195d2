"""Ranks that divide sequences among them train as one rank does that has them whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.learner import JOB, assert_same_weights, run_ranks, save_tiny_model
from tests.support.learner_reference import Gradients
from tests.support.mixtures import save_mixture

pytestmark = [pytest.mark.integration, pytest.mark.slow]

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
# Ranks, and how many of them divide a sequence.
GROUPS = [(4, 4), (4, 2)]


@pytest.fixture(scope="module")
def results(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], dict[str, Any]]:
    """What each case leaves on one rank, and on every number of ranks."""
    folder = tmp_path_factory.mktemp("sequences")
    other = save_tiny_model(folder / "other", seed=1)
    for family in set(MIXTURES.values()):
        save_mixture(folder / family, family, num_attention_heads=4, num_key_value_heads=2)

    def job(name: str, size: int) -> Job:
        learner, batch = CASES[name]
        settings = {"token_budget": 100, "sequence_parallel": size} | learner
        if "kl_coef" in settings.get("algorithm", {}):
            settings["algorithm"] = settings["algorithm"] | {"reference": other}
        path = str(folder / MIXTURES[name]) if name in MIXTURES else model
        return {**JOB, "model": path, "learner": settings, "gradients_only": True, **batch}

    left = {(1, 1): run_ranks(1, {name: job(name, 1) for name in CASES}, folder)}
    (folder / "4").mkdir()
    done = run_ranks(4, {f"{name} by {size}": job(name, size) for name in CASES for _, size in GROUPS}, folder / "4")
    return left | {(4, size): {name: done[f"{name} by {size}"] for name in CASES} for _, size in GROUPS}


def largest(gradients: Gradients) -> float:
    return max(float(gradient.abs().max()) for gradient in gradients.values())


@pytest.mark.parametrize("groups", GROUPS, ids=lambda groups: "{} ranks by {}".format(*groups))
@pytest.mark.parametrize("name", CASES)
def test_gradients_and_metrics_are_those_of_one_rank(results, name, groups):
    """Gradients differ by less than a millionth of the largest."""
    expected, actual = results[1, 1][name], results[groups][name]
    gradients = expected["gradients"]
    assert actual["gradients"].keys() == gradients.keys()
    difference = largest({key: actual["gradients"][key] - gradient for key, gradient in gradients.items()})
    assert largest(gradients) > 0
    assert difference <= 1e-6 * largest(gradients)
    metrics = {key: value for key, value in expected["metrics"][0].items() if key not in OWN}
    assert {key: actual["metrics"][0][key] for key in metrics} == pytest.approx(metrics, rel=1e-4, abs=1e-6)


def test_a_checkpoint_is_continued_with_another_division(model: str, tmp_path: Path) -> None:
    def job(size: int, **others: Any) -> Job:
        learner = {"zero_stage": 2, "grad_clip": 0.5, "sequence_parallel": size}
        return {"model": model, "folder": str(tmp_path / "run"), "steps": 4, "learner": learner} | others

    jobs = {"written": job(2, begin=2), "same": job(2, load=True), "whole": job(1, load=True)}
    left = run_ranks(2, jobs, tmp_path)
    assert left["same"]["loaded"] == left["whole"]["loaded"] == 2
    assert_same_weights(left["same"], left["written"])
    assert_same_weights(left["whole"], left["written"], rtol=1e-3)
