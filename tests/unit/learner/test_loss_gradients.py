"""Gradients of every loss: against plain formulas, on-policy, at extremes, and with every correction."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from common.config import AlgorithmConfig, CorrectionConfig
from common.config.presets import PRESETS
from learner.correction import Correction, correct
from learner.losses import LOSSES, Denominators, policy_loss
from learner.stats import Stats
from learner.step_loss import PolicyOutput, Precomputed, TrainPosition, step_loss
from tests.support.learner import tokens_of_rows

MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
LENGTHS = [3, 0, 5, 1, 4]
WIDTH = 6


def padded_batch(seed: int = 0, scale: float = 0.5, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """Rows of LENGTHS with log-probs that are about `scale` apart; advantages one a row, of both signs."""
    torch.manual_seed(seed)
    shape = (len(LENGTHS), WIDTH)
    old = -3 * torch.rand(shape, dtype=dtype)
    return {
        "logprobs": old + scale * torch.randn(shape, dtype=dtype),
        "old": old,
        "rollout": old + scale * torch.randn(shape, dtype=dtype),
        "advantages": torch.tensor([1.3, 0.4, -0.7, -1.6, 0.9], dtype=dtype)[:, None].expand(shape).clone(),
        "mask": torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None],
        "weights": 2 * torch.rand(shape, dtype=dtype),
    }


def loss_and_gradient(
    name: str, batch: dict[str, torch.Tensor], config: AlgorithmConfig, correction: Correction | None = None
) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    leaf = batch["logprobs"].clone().requires_grad_()
    loss, metrics = policy_loss(
        name, leaf, batch["old"], batch["advantages"], batch["mask"], config, correction, None, batch["rollout"]
    )
    loss.backward()
    return loss.detach(), leaf.grad, metrics


# The formulas, for one token or one row, on scalars.


def clip(value: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return low + 0 * value if value < low else high + 0 * value if value > high else value


def plain_ppo(row: list, config: AlgorithmConfig) -> list[torch.Tensor]:
    losses = []
    for new, old, _, advantage in row:
        ratio = torch.exp(new - old)
        surrogate = min(ratio * advantage, clip(ratio, 1 - config.clip_low, 1 + config.clip_high) * advantage)
        losses.append(-surrogate if advantage >= 0 else -max(surrogate, config.clip_dual * advantage + 0 * ratio))
    return losses


def plain_gspo(row: list, config: AlgorithmConfig) -> list[torch.Tensor]:
    value = math.exp(sum(float((new - old).detach()) for new, old, _, _ in row) / len(row))
    losses = []
    for new, _, _, advantage in row:
        ratio = value * torch.exp(new - new.detach())
        losses.append(-min(ratio * advantage, clip(ratio, 1 - config.clip_low, 1 + config.clip_high) * advantage))
    return losses


def plain_cispo(row: list, config: AlgorithmConfig) -> list[torch.Tensor]:
    def factor(new: torch.Tensor, old: torch.Tensor) -> float:
        return min(max(math.exp(float((new - old).detach())), 1 - config.clip_low), 1 + config.clip_high)

    return [-factor(new, old) * advantage * new for new, old, _, advantage in row]


def plain_sapo(row: list, config: AlgorithmConfig) -> list[torch.Tensor]:
    losses = []
    for new, old, _, advantage in row:
        tau = config.tau_pos if advantage > 0 else config.tau_neg
        losses.append(-advantage * (4 / tau) / (1 + torch.exp(-tau * (torch.exp(new - old) - 1))))
    return losses


def plain_reinforce(row: list, config: AlgorithmConfig) -> list[torch.Tensor]:
    return [-advantage * new for new, _, _, advantage in row]


def plain_double_sided(row: list, config: AlgorithmConfig) -> list[torch.Tensor]:
    losses = []
    for new, old, rollout, advantage in row:
        inside = config.band_low <= math.exp(float((new - rollout).detach())) <= config.band_high
        losses.append(-advantage * torch.exp(new - old) if inside else 0 * new)
    return losses


PLAIN: dict[str, Callable[[list, AlgorithmConfig], list[torch.Tensor]]] = {
    "ppo_clip": plain_ppo,
    "gspo": plain_gspo,
    "cispo": plain_cispo,
    "sapo": plain_sapo,
    "reinforce": plain_reinforce,
    "double_sided": plain_double_sided,
}


def plain_loss(
    name: str, leaf: torch.Tensor, batch: dict[str, torch.Tensor], keep: torch.Tensor, config: AlgorithmConfig
) -> torch.Tensor:
    """The loss by loops over kept tokens, with their weights."""
    of_rows = []
    for row in range(len(leaf)):
        places = [place for place in range(WIDTH) if keep[row, place]]
        tokens = [
            (leaf[row, p], batch["old"][row, p], batch["rollout"][row, p], float(batch["advantages"][row, p]))
            for p in places
        ]
        losses = PLAIN[name](tokens, config) if tokens else []
        of_rows.append([float(batch["weights"][row, p]) * loss for p, loss in zip(places, losses, strict=True)])
    full = [row for row in of_rows if row]
    if config.aggregation == "token-mean":
        return sum(sum(row) for row in full) / sum(len(row) for row in full)
    if config.aggregation == "seq-mean-token-mean":
        return sum(sum(row) / len(row) for row in full) / len(full)
    horizon = WIDTH if config.aggregation == "seq-mean-token-sum-norm" else 1
    return sum(sum(row) for row in full) / (len(full) * horizon)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("scale", [0.05, 0.5, 3.0])
def test_loss_and_gradient_are_those_of_the_plain_formula(name, mode, scale):
    config = AlgorithmConfig(aggregation=mode, clip_dual=3.0, band_low=0.6, band_high=1.5, tau_pos=0.75, tau_neg=1.75)
    batch = padded_batch(scale=scale)
    if scale == 0.5:
        batch["advantages"][:, 2:] *= -0.5  # turns of one row have advantages of both signs
    keep = batch["mask"].clone()
    keep[2, 1] = keep[4, 0] = keep[3, 0] = False
    loss, gradient, _ = loss_and_gradient(name, batch, config, Correction(batch["weights"], keep))
    leaf = batch["logprobs"].clone().requires_grad_()
    expected = plain_loss(name, leaf, batch, keep, config)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(gradient, leaf.grad, rtol=1e-10, atol=1e-14)
    assert bool((gradient != 0).any()) or (name in ("double_sided", "gspo") and scale == 3.0)


def test_clips_and_bands_bind_in_the_examples():
    batch = padded_batch(scale=0.5)
    metrics_of = {name: loss_and_gradient(name, batch, AlgorithmConfig(clip_dual=1.5))[2] for name in LOSSES}
    assert all(
        metrics_of[name]["actor/clip_low"] > 0 and metrics_of[name]["actor/clip_high"] > 0
        for name in ("ppo_clip", "cispo")
    )
    assert metrics_of["ppo_clip"]["actor/pg_clipfrac_lower"] > 0
    assert metrics_of["gspo"]["actor/pg_clipfrac"] > 0
    assert metrics_of["double_sided"]["actor/band_low"] > 0
    assert 0 < metrics_of["sapo"]["actor/gate_slope"] < 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LOSSES)
def test_on_policy_every_loss_is_the_plain_policy_gradient(name, mode):
    batch = padded_batch()
    batch["old"] = batch["rollout"] = batch["logprobs"]
    _, gradient, metrics = loss_and_gradient(name, batch, AlgorithmConfig(aggregation=mode))
    lengths, full = torch.tensor(LENGTHS, dtype=torch.float64).clamp(min=1), 4
    divisor = {
        "token-mean": torch.full_like(lengths, sum(LENGTHS)),
        "seq-mean-token-sum": torch.full_like(lengths, full),
        "seq-mean-token-mean": full * lengths,
        "seq-mean-token-sum-norm": torch.full_like(lengths, full * WIDTH),
    }[mode]
    expected = torch.where(batch["mask"], -batch["advantages"] / divisor[:, None], 0.0)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=0)
    binding = ("actor/pg_clipfrac", "actor/clip_low", "actor/clip_high", "actor/band_low", "actor/band_high")
    assert all(metrics.get(key, 0) == 0 for key in (*binding, "actor/ppo_kl"))


@pytest.mark.parametrize("name", LOSSES)
def test_nan_in_masked_places_reaches_no_loss_no_gradient_and_no_metric(name):
    batch = padded_batch()
    correction = Correction(batch["weights"], batch["mask"])
    clean = loss_and_gradient(name, batch, AlgorithmConfig(), correction)
    for junk in (torch.nan, torch.inf, -torch.inf):
        dirty = {
            key: values if key == "mask" else torch.where(batch["mask"], values, junk) for key, values in batch.items()
        }
        result = loss_and_gradient(name, dirty, AlgorithmConfig(), Correction(dirty["weights"], batch["mask"]))
        assert torch.equal(result[0], clean[0])
        assert torch.equal(result[1], clean[1])
        assert result[2] == clean[2]


@pytest.mark.parametrize("name", LOSSES)
def test_a_rejected_token_with_nan_leaves_the_others_as_they_are(name):
    batch = padded_batch()
    keep = batch["mask"].clone()
    keep[2, 1] = False
    clean = loss_and_gradient(name, batch, AlgorithmConfig(), Correction(batch["weights"], keep))
    for key in ("logprobs", "old", "rollout", "weights"):
        batch[key][2, 1] = torch.nan
    result = loss_and_gradient(name, batch, AlgorithmConfig(), Correction(batch["weights"], keep))
    assert torch.equal(result[0], clean[0])
    assert torch.equal(result[1], clean[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize("name", LOSSES)
def test_extreme_log_ratios_give_finite_losses_and_gradients(name, sign, dtype):
    batch = padded_batch(dtype=dtype)
    for size in (30.0, 1e3, 1e4):
        batch["logprobs"] = batch["old"] + sign * size
        correction = correct(batch["old"], batch["rollout"], batch["mask"], CorrectionConfig(rollout_is="token"))
        loss, gradient, metrics = loss_and_gradient(name, batch, AlgorithmConfig(), correction)
        assert bool(loss.isfinite())
        assert bool(gradient.isfinite().all())
        assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LOSSES)
def test_losses_gradients_and_metrics_of_parts_add_up_with_global_denominators(name, mode):
    batch, config = padded_batch(), AlgorithmConfig(aggregation=mode)
    keep = batch["mask"].clone()
    keep[3] = keep[2, 0] = False
    whole = loss_and_gradient(name, batch, config, Correction(batch["weights"], keep))
    total, gradients, metrics_of_parts = 0.0, [], []
    for part in (slice(0, 1), slice(1, 3), slice(3, 4), slice(4, 5)):
        leaf = batch["logprobs"][part].clone().requires_grad_()
        loss, metrics = policy_loss(
            name,
            leaf,
            *(batch[key][part] for key in ("old", "advantages", "mask")),
            config,
            Correction(batch["weights"][part], keep[part]),
            Denominators.of(keep),
            batch["rollout"][part],
        )
        loss.backward()
        total += loss.item()
        gradients.append(leaf.grad)
        metrics_of_parts.append(metrics)
    assert total == pytest.approx(whole[0].item(), rel=1e-12)
    torch.testing.assert_close(torch.cat(gradients), whole[1], rtol=1e-12, atol=0)
    for key, value in whole[2].items():
        assert sum(metrics[key] for metrics in metrics_of_parts) == pytest.approx(value, rel=1e-9, abs=1e-12), key


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_takes_every_preset_in_every_aggregation(name, preset):
    """By the learner's own path, on tokens that are nearly on-policy and on tokens that are far off."""
    for mode in MODES:
        for scale in (1e-4, 2.0):
            batch = padded_batch(scale=scale, dtype=torch.float32)
            mask = batch["mask"]
            tokens = {key: batch[key][mask] for key in ("logprobs", "old", "rollout", "advantages")}
            correction = {"preset": preset, "loss_type": "reinforce" if name == "reinforce" else "ppo_clip"}
            config = AlgorithmConfig(loss=name, aggregation=mode, correction=correction)
            micro = tokens_of_rows(LENGTHS, tokens["rollout"], tokens["advantages"])
            leaf = tokens["logprobs"].clone().requires_grad_()
            old = tokens["old"] if config.proximal == "recompute" else None
            policy, position = PolicyOutput(leaf, torch.ones_like(leaf)), TrainPosition(1, 0, 1, Denominators.of(mask))
            step = step_loss(micro, policy, Precomputed(old), position, LOSSES[name], config, Stats())
            step.loss.backward()
            assert bool(step.loss.isfinite())
            assert bool(leaf.grad.isfinite().all())
            padded, gradient, metrics = loss_and_gradient(
                name, batch, config, correct(batch["old"], batch["rollout"], mask, config.correction)
            )
            assert bool(padded.isfinite())
            assert bool(gradient.isfinite().all())
            assert all(isinstance(value, float) and math.isfinite(value) for value in metrics.values())
