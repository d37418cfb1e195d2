"""Replayed experts and the balance of experts are the same on any number of ranks, however weights are divided."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.learner import JOB, run_ranks
from tests.support.mixtures import save_mixture

pytestmark = [pytest.mark.integration, pytest.mark.slow]

# Of the tokens of the one micro-batch that is all, and of micro-batches of 100 tokens.
REPLAYED: dict[str, Any] = {"router_replay": "rollout", "router_balance": 0.0, "token_budget": 4096}
METRICS = {"router/load_max", "router/load_min", "router/entropy", "router/replayed", "router/differs"}


def test_ranks_and_micro_batches_replay_the_same_experts(tmp_path: Path) -> None:
    model = tmp_path / "model"
    save_mixture(model, "Qwen3-MoE")
    base = {**JOB, "model": str(model), "gradients_only": True, "experts": [2, 2, 8], "samples": 8}

    def job(**learner: Any) -> dict[str, Any]:
        return base | {"learner": REPLAYED | learner}

    alone = {
        "whole": job(),
        "parts": job(token_budget=100),
        "recomputed": job(gradient_checkpointing=True),
        "own": job(router_replay="none"),
        "balanced": job(router_balance=0.5),
    }
    pair = {f"stage {stage}": job(zero_stage=stage, token_budget=100) for stage in range(4)}
    pair["balanced 3"] = job(router_balance=0.5, zero_stage=3, gradient_checkpointing=True)
    results = run_ranks(1, alone, tmp_path) | run_ranks(2, pair, tmp_path)
    whole = results["whole"]
    for name in ("parts", "recomputed", *(f"stage {stage}" for stage in range(4))):
        assert_close(results[name]["gradients"], whole["gradients"])
        for metric in METRICS:
            assert results[name]["metrics"][0][metric] == pytest.approx(whole["metrics"][0][metric], rel=1e-4), metric
    assert whole["metrics"][0]["router/replayed"] == 1
    assert whole["metrics"][0]["router/differs"] > 0.5
    assert "router/differs" not in results["own"]["metrics"][0]
    gate = "model.layers.0.mlp.gate.weight"
    assert not torch.allclose(results["own"]["gradients"][gate], whole["gradients"][gate], rtol=0.1)
    # The two ranks have a half of the tokens each, of which each takes its own shares of experts.
    balanced, divided = (
        (results[name]["gradients"][gate] - whole["gradients"][gate]) for name in ("balanced", "balanced 3")
    )
    assert balanced.abs().max() > 1e-4
    assert torch.nn.functional.cosine_similarity(balanced.flatten(), divided.flatten(), dim=0) > 0.9


def assert_close(gradients: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert gradients.keys() == expected.keys()
    scale = max(gradient.abs().max() for gradient in expected.values())
    for name, gradient in expected.items():
        assert (gradients[name] - gradient).abs().max() < 1e-5 * scale, name
