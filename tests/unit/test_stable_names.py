"""Names that users' scripts import stay, with their parameters, wherever the code behind them moves."""

from __future__ import annotations

import inspect
import tomllib
from pathlib import Path
from pkgutil import resolve_name

import numpy as np
import pytest

from sampler.tracker import TrackerConfig, ValueTracker

CALLS = {
    "sampler.tracker:ValueTracker": ["prompt_ids", "config"],
    "sampler.tracker:ValueTracker.value": ["self", "prompt_id"],
    "sampler.tracker:ValueTracker.update": ["self", "prompt_id", "reward", "kl"],
    "sampler.tracker:ValueTracker.initialize": ["self", "scores"],
    "sampler.tracker:ValueTracker.counts": ["self", "prompt_id"],
    "sampler.tracker:ValueTracker.sampling_weights": ["self"],
    "sampler.tracker:ValueTracker.select": ["self", "n", "rng", "exclude"],
    "sampler.tracker:ValueTracker.state_dict": ["self"],
    "sampler.tracker:ValueTracker.load_state_dict": ["self", "state"],
    "sampler.advantages:normalize": ["raw", "weights"],
    "learner.correction:CorrectionConfig.preset": ["name", "overrides"],
    "learner.correction:CorrectionConfig.presets": [],
    "learner.correction:correct": ["old_logprobs", "rollout_logprobs", "mask", "config"],
    "learner.losses:policy_loss": [
        "name", "logprobs", "old_logprobs", "advantages", "mask", "config", "correction",
    ],
    "sandbox_client:run_code": ["code"],
    "sandbox_client:SandboxClient": [],
    "sandbox_client:make_sandbox": ["config"],
}  # fmt: skip


@pytest.mark.parametrize("path", CALLS)
def test_what_scripts_call_keeps_its_name_and_its_first_parameters(path: str) -> None:
    assert list(inspect.signature(resolve_name(path)).parameters)[: len(CALLS[path])] == CALLS[path]


def test_the_commands_keep_their_names() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert {"spo", "spo-sampler", "spo-generator", "spo-learner", "spo-relay", "spo-sandbox"} <= set(project["scripts"])


def test_a_tracker_made_by_a_script_is_the_papers_and_selects_by_id() -> None:
    tracker = ValueTracker(["a", "b", "c"], TrackerConfig())
    assert tracker.update("a", 1.0, kl=0.0) == 0.5
    alpha, beta = tracker.counts("a")
    assert tracker.value("a") == alpha / (alpha + beta) > 0.5
    for seed in range(20):
        assert sorted(tracker.select(2, np.random.default_rng(seed), exclude=["b"])) == ["a", "c"]
    assert "b" in tracker.select(3, np.random.default_rng(0), exclude=["b"])
