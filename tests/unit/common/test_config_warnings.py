"""Settings without effect are named once, with the reason; what counts is never named."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from common.config import AlgorithmConfig, Config, parse_config
from common.config.presets import ALIASES, PRESETS
from common.config.warnings import KNOBS, warnings
from learner.losses import policy_loss

# Every knob of a loss, at a value that is not its default.
CHANGED = {knob: {"clip_low": 0.1, "clip_high": 0.4, "band_low": 0.7}.get(knob, 3.0) for knob in KNOBS}
BASE = {"model": {"path": "m"}, "data": {"train": "t.jsonl"}}


def config(algorithm: dict[str, Any] | None = None, mini_batches: int = 1) -> Config:
    return parse_config({**BASE, "algorithm": algorithm or {}, "learner": {"mini_batches": mini_batches}})


def corrected(**fields: Any) -> dict[str, Any]:
    return {"correction": fields}


@pytest.mark.parametrize("mini_batches", [1, 4])
@pytest.mark.parametrize("name", [*PRESETS, *ALIASES])
def test_no_preset_warns_of_itself(name: str, mini_batches: int) -> None:
    assert warnings(config(corrected(preset=name), mini_batches)) == []


@pytest.mark.parametrize(
    "algorithm",
    [
        {},
        corrected(rollout_is="token", rollout_is_threshold=3.0, rollout_is_batch_normalize=True),
        corrected(bypass_mode=True, rollout_is=None),
        corrected(bypass_mode=True, loss_type="reinforce", rollout_is="sequence"),
        corrected(rollout_is=None, rollout_rs="token_k1", rollout_rs_threshold=2.0, verl_compatible_k1=True),
        corrected(
            rollout_is=None, rollout_rs="token_k2", rollout_rs_threshold=2.0, thresholds_by_age=[1, 1, 1, 1, 0.5]
        ),
        corrected(rollout_is="token", thresholds_by_age=[1, 1, 1, 1, 0.5]),
        corrected(skyrl={"token_mask_is_threshold_low": 0.5, "token_mask_is_threshold_high": 2.0}),
        corrected(skyrl={"outlier_token_is_threshold_low": 1e-4}, thresholds_by_age=[1, 1, 1, 1, 0.5]),
        corrected(skyrl={"sequence_mask_metric": "geometric", "geo_mask_low": 0.9}),
        corrected(skyrl={"tis_ratio_type": "token", "token_tis_ratio_clip_high": 3.0}),
        {"loss": "sapo", "tau_pos": 2.0, "tau_neg": 2.0},
        {"loss": "gspo"},
        {"loss": "cispo", "clip_low": 10.0, "clip_high": 4.0},
        {"loss": "double_sided", "band_low": 0.7, "band_high": 2.0},
        {"clip_low": 0.1, "clip_high": 0.3, "clip_dual": 3.0},
        {"kl_coef": 0.1, "kl_estimator": "k2", "reference": "elsewhere"},
        {"ess_lr": "sqrt", **corrected(rollout_is=None, rollout_token_veto_threshold=1e-4)},
        # The weights scale the learning rate, though not the loss.
        {"ess_lr": "sqrt", "proximal": "rollout", **corrected(rollout_is="token")},
    ],
    ids=str,
)
def test_what_counts_is_not_named(algorithm: dict[str, Any]) -> None:
    assert warnings(config(algorithm)) == []


@pytest.mark.parametrize(
    ("algorithm", "told"),
    [
        (corrected(rollout_is=None, rollout_is_threshold=3.0), "rollout_is_threshold = 3.0 has no effect while"),
        (corrected(skyrl={}, rollout_is_threshold=3.0), "rollout_is_threshold = 3.0 has no effect beside skyrl"),
        (corrected(bypass_mode=True, rollout_is="token"), "rollout_is = 'token' is measured only"),
        ({"proximal": "rollout", "loss": "gspo"}, "rollout_is = 'sequence' is measured only"),
        (
            {"proximal": "rollout", **corrected(skyrl={"tis_ratio_type": "sequence"})},
            "skyrl.tis_ratio_type = 'sequence' is measured only",
        ),
        (corrected(rollout_is="token", loss_type="reinforce"), "loss_type = 'reinforce' has no effect without"),
        (corrected(preset="bypass_pg_is", bypass_mode=False), "loss_type = 'reinforce' has no effect without"),
        (
            corrected(rollout_is="token", verl_compatible_k1=True),
            "verl_compatible_k1 = True has no effect on rollout_rs = None",
        ),
        (
            corrected(rollout_rs="seq_mean_k3", rollout_rs_threshold=0.1, verl_compatible_k1=True),
            "has no effect on rollout_rs = 'seq_mean_k3'",
        ),
        (corrected(rollout_is=None, thresholds_by_age=[1, 1, 1, 1, 0.5]), "thresholds_by_age has no effect"),
        (corrected(skyrl={}, thresholds_by_age=[1, 1, 1, 1, 0.5]), "thresholds_by_age has no effect"),
        (
            corrected(rollout_is=None, rollout_token_veto_threshold=1e-4, thresholds_by_age=[1, 1, 1, 1, 0.5]),
            "thresholds_by_age has no effect",
        ),
        (corrected(skyrl={"token_mask_is_threshold_low": 0.5}), "without token_mask_is_threshold_high"),
        (corrected(skyrl={"token_mask_is_threshold_high": 2.0}), "without token_mask_is_threshold_low"),
        (corrected(skyrl={"sequence_mask_metric": "product", "geo_mask_low": 0.9}), "geo_mask_low = 0.9 counts with"),
        (corrected(skyrl={"product_mask_high": 3.0}), "product_mask_high = 3.0 counts with"),
        (
            corrected(skyrl={"tis_ratio_type": "token", "sequence_tis_ratio_clip_high": 4.0}),
            "sequence_tis_ratio_clip_high = 4.0 counts with tis_ratio_type = 'sequence' only (given: 'token')",
        ),
        (corrected(skyrl={"token_tis_ratio_clip_high": 3.0}), "token_tis_ratio_clip_high = 3.0 counts with"),
        (
            {"loss": "gspo", "aggregation": "token-mean"},
            "aggregation = 'token-mean' with loss 'gspo' departs from verl",
        ),
        (
            {"loss": "sapo", "aggregation": "token-mean"},
            "aggregation = 'token-mean' with loss 'sapo' departs from verl",
        ),
        ({"clip_low": 2.0}, "clip_low = 2 switches the lower clip off"),
        ({"turn_advantage": "turn"}, "turn_advantage = 'turn' tells turns apart by what a simulated user gave"),
        ({"kl_estimator": "k2"}, "kl_estimator = 'k2' has no effect while kl_coef is 0"),
        ({"reference": "elsewhere"}, "reference = 'elsewhere' has no effect while kl_coef is 0"),
        ({"kl_coef": 0.1, "kl_estimator": "k1"}, "kl_estimator = 'k1' has no effect on average"),
        ({"ess_lr": "sqrt", **corrected(rollout_is=None)}, "ess_lr = 'sqrt' has no effect without"),
        ({"ess_lr": "linear", **corrected(skyrl={})}, "ess_lr = 'linear' has no effect without"),
        ({"proximal": "interpolate"}, "proximal = 'interpolate' saves nothing while learner.mini_batches = 1"),
        ({"proximal": "compare"}, "proximal = 'compare' compares nothing while learner.mini_batches = 1"),
    ],
    ids=str,
)
def test_a_setting_without_effect_is_named_with_the_reason(algorithm: dict[str, Any], told: str) -> None:
    [line] = warnings(config(algorithm))
    assert told in line
    assert line.startswith("algorithm.")


@pytest.mark.parametrize("knob", CHANGED)
@pytest.mark.parametrize("loss", ["ppo_clip", "gspo", "cispo", "sapo", "reinforce", "double_sided"])
def test_a_knob_is_named_exactly_where_the_loss_does_not_depend_on_it(loss: str, knob: str) -> None:
    made = config({"loss": loss, knob: CHANGED[knob]})
    depends = value_of(made.algorithm) != value_of(config({"loss": loss}).algorithm)
    expected = [] if depends else [f"algorithm.{knob} = {CHANGED[knob]} has no effect on loss {loss!r}"]
    assert [line.partition(";")[0] for line in warnings(made)] == expected


def value_of(algorithm: AlgorithmConfig) -> float:
    """The loss of rows of one token, whose ratios go from 1/20 to 20 under either sign of the advantage."""
    logprobs = torch.linspace(-3.0, 3.0, 41, dtype=torch.float64).repeat(2)[:, None]
    # Unequal, lest the two signs cancel.
    advantages = torch.tensor([1.0, -2.0], dtype=torch.float64).repeat_interleave(41)[:, None]
    old, mask = torch.zeros_like(logprobs), torch.ones_like(logprobs)
    loss, _ = policy_loss(algorithm.loss, logprobs, old, advantages, mask, algorithm)
    return float(loss)


def test_interpolation_saves_nothing_where_weights_are_normalised() -> None:
    made = {"proximal": "interpolate", **corrected(rollout_is="token", rollout_is_batch_normalize=True)}
    [line] = warnings(config(made, mini_batches=4))
    assert "the weights' mean takes a forward pass of its own" in line
    assert warnings(config({"proximal": "interpolate"}, mini_batches=4)) == []


def test_measured_weights_that_are_normalised_are_named_twice() -> None:
    found = warnings(config(corrected(bypass_mode=True, rollout_is_batch_normalize=True)))
    assert ["measured only" in line for line in found] == [True, True]


def test_a_threshold_left_over_from_a_preset_is_not_named() -> None:
    # `icepop` sets rollout_is_threshold itself; only what the user wrote can mislead the user.
    assert warnings(config(corrected(preset="icepop", rollout_is=None))) == []
    assert len(warnings(config(corrected(preset="icepop", rollout_is=None, rollout_is_threshold=4.0)))) == 1


@pytest.mark.parametrize(
    ("sections", "line"),
    [
        (
            {"sampler": {"drift": {"rho": 0.5}}},
            "sampler.drift.rho = 0.5 has no effect with sampler.drift.mode = 'rescore'",
        ),
        ({"sampler": {"drift": {"rho": 0.5, "mode": "constant"}}}, None),
        ({"learner": {"min_lr_ratio": 0.1}}, "learner.min_lr_ratio = 0.1 has no effect with learner.schedule"),
        ({"learner": {"min_lr_ratio": 0.1, "schedule": "cosine"}}, None),
        ({"eval": {"samples": 8}}, "eval.samples = 8 has no effect without data.heldout"),
        ({"eval": {"samples": 8}, "data": {"train": "t.jsonl", "heldout": "h.jsonl"}}, None),
        ({"generator": {"keep_prefix": "episodes"}}, None),
        (
            {"generator": {"keep_prefix": "episodes"}, "learner": {"lora": {"rank": 4}, "lr": 1e-4}},
            "generator.keep_prefix = 'episodes' has no effect with learner.lora.serve = 'adapter'",
        ),
        (
            {"generator": {"keep_prefix": "episodes"}, "learner": {"lora": {"rank": 4, "serve": "merged"}, "lr": 1e-4}},
            None,
        ),
        (
            {"generator": {"keep_prefix": "episodes", "engine": {"enable_prefix_caching": False}}},
            "generator.keep_prefix = 'episodes' has no effect with generator.engine.enable_prefix_caching",
        ),
    ],
    ids=str,
)
def test_a_setting_of_another_mode_is_named(sections: dict[str, Any], line: str | None) -> None:
    lines = warnings(parse_config(BASE | sections))
    assert [one.startswith(line or "") for one in lines] == ([True] if line else [])
