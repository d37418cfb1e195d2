"""The policy losses a second time, from their formulas: loops over scalars, whose gradients autograd takes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from common.config import AlgorithmConfig
from common.config.algorithm import loss_options

# The formulas, for one row, on scalars: log pi_theta, log pi_old, log pi_rollout, advantage, weight, and whether the
# comparison with all tokens has chosen it.


def clip(value: Any, config: AlgorithmConfig) -> Any:
    options = loss_options(config.loss, config)
    low, high = 1 - options["low"], 1 + options["high"]
    return low + 0 * value if value < low else high + 0 * value if value > high else value


def plain_ppo(row: list, config: AlgorithmConfig) -> list[torch.Tensor]:
    losses, cap = [], loss_options(config.loss, config)["cap"]
    for new, old, _, advantage, *_ in row:
        ratio = torch.exp(new - old)
        surrogate = min(ratio * advantage, clip(ratio, config) * advantage)
        losses.append(-surrogate if advantage >= 0 else -max(surrogate, cap * advantage + 0 * ratio))
    return losses


def plain_gspo(row: list, config: AlgorithmConfig) -> list[torch.Tensor]:
    value = math.exp(sum(float((new - old).detach()) for new, old, *_ in row) / len(row))
    ratios = [(value * torch.exp(new - new.detach()), advantage) for new, _, _, advantage, *_ in row]
    return [-min(ratio * advantage, clip(ratio, config) * advantage) for ratio, advantage in ratios]


def plain_cispo(row: list, config: AlgorithmConfig) -> list[torch.Tensor]:
    return [-clip(torch.exp((new - old).detach()), config) * advantage * new for new, old, _, advantage, *_ in row]


def plain_sapo(row: list, config: AlgorithmConfig) -> list[torch.Tensor]:
    losses, options = [], loss_options(config.loss, config)
    for new, old, _, advantage, *_ in row:
        tau = options["tau_pos" if advantage > 0 else "tau_neg"]
        losses.append(-advantage * (4 / tau) / (1 + torch.exp(-tau * (torch.exp(new - old) - 1))))
    return losses


def plain_reinforce(row: list, config: AlgorithmConfig) -> list[torch.Tensor]:
    return [-advantage * new for new, _, _, advantage, *_ in row]


def plain_double_sided(row: list, config: AlgorithmConfig) -> list[torch.Tensor]:
    losses, options = [], loss_options(config.loss, config)
    for new, old, rollout, advantage, *_ in row:
        inside = options["low"] <= math.exp(float((new - rollout).detach())) <= options["high"]
        losses.append(-advantage * torch.exp(new - old) if inside else 0 * new)
    return losses


def plain_importance_sampling(row: list, config: AlgorithmConfig) -> list[torch.Tensor]:
    return [-advantage * torch.exp(new - old) for new, old, _, advantage, *_ in row]


def plain_dro(row: list, config: AlgorithmConfig) -> list[torch.Tensor]:
    beta = config.loss_options["beta"]
    return [-advantage * new + beta / 2 * (new - old) ** 2 for new, old, _, advantage, *_ in row]


def plain_dppo(name: str) -> Callable[[list, AlgorithmConfig], list[torch.Tensor]]:
    def losses(row: list, config: AlgorithmConfig) -> list[torch.Tensor]:
        results = []
        for new, old, _, advantage, *_ in row:
            p, q = math.exp(float(new.detach())), math.exp(float(old))
            if name == "dppo_tv":
                valid = p - q <= 0.2 if advantage > 0 else p - q >= -0.2
            else:
                away = q * math.log(q / p) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8)) if p < 1 else 1.0
                valid = away <= 0.05 or (p <= q if advantage > 0 else p >= q)
            results.append(-advantage * min(p / q, 20.0) * new if valid else 0 * new)
        return results

    return losses


def plain_geo_mean(row: list, config: AlgorithmConfig) -> list[torch.Tensor]:
    held = []
    for new, old, _, advantage, *_ in row:
        x, bound = new - old, 0.4 if advantage > 0 else -0.4
        held.append(0 * x + bound if (x > bound if advantage > 0 else x < bound) else x)
    weight = math.exp(sum(math.log(weight + 1e-10) for *_, weight, _ in row) / len(row))
    mean = sum(advantage for _, _, _, advantage, *_ in row) / len(row)
    return [-mean * weight * torch.exp(sum(held) / len(row))] * len(row)


def plain_vespo(row: list, config: AlgorithmConfig) -> list[torch.Tensor]:
    log_w = sum(float((new - old).detach()) for new, old, *_ in row)
    # The weights are those of rows, as in the recommended correction.
    log_w += sum(max(math.log(weight), math.log(1e-8)) for *_, weight, _ in row) / len(row)
    log_w = min(max(log_w, math.log(1e-8)), 20.0)
    results = []
    for new, _, _, advantage, *_ in row:
        k, rate = (2.0, 3.0) if advantage >= 0 else (3.0, 2.0)
        results.append(-math.exp(rate + k * log_w - rate * math.exp(log_w)) * advantage * new)
    return results


def plain_kl_cov(row: list, config: AlgorithmConfig) -> list[torch.Tensor]:
    coef = config.loss_options["coef"]
    return [
        -advantage * torch.exp(new - old) + (coef * abs(new - old) if chosen else 0)
        for new, old, _, advantage, _, chosen in row
    ]


def plain_clip_cov(row: list, config: AlgorithmConfig) -> list[torch.Tensor]:
    losses = []
    for new, old, _, advantage, _, chosen in row:
        ratio = torch.exp(new - old)
        losses.append(0 * new if chosen else -min(ratio * advantage, clip(ratio, config) * advantage))
    return losses


def plainly_chosen(name: str, tokens: dict[tuple[int, int], tuple], config: AlgorithmConfig) -> set[tuple[int, int]]:
    """The places that a loss chooses among all kept tokens."""
    options = config.loss_options
    logprobs, advantages = ([float(torch.as_tensor(token[at]).detach()) for token in tokens.values()] for at in (0, 3))
    log_mean, mean = sum(logprobs) / len(logprobs), sum(advantages) / len(advantages)
    covariances = {
        place: (advantage - mean) * (logprob - log_mean)
        for place, logprob, advantage in zip(tokens, logprobs, advantages, strict=True)
    }
    if name == "kl_cov":
        count = max(1, int(options["ratio"] * len(tokens)))
        return set(sorted(tokens, key=lambda place: -covariances[place])[:count])
    chosen = set()
    for place, (new, old, _, advantage, _) in tokens.items():
        ratio = math.exp(float(new.detach()) - float(old))
        binds = min(ratio * advantage, clip(ratio, config) * advantage) < ratio * advantage
        if not binds and options["cov_low"] < covariances[place] < options["cov_high"]:
            chosen.add(place)
    return chosen


PLAIN: dict[str, Callable[[list, AlgorithmConfig], list[torch.Tensor]]] = {
    "ppo_clip": plain_ppo,
    "gspo": plain_gspo,
    "cispo": plain_cispo,
    "sapo": plain_sapo,
    "reinforce": plain_reinforce,
    "gpg": plain_reinforce,
    "double_sided": plain_double_sided,
    "importance_sampling": plain_importance_sampling,
    "dppo_tv": plain_dppo("dppo_tv"),
    "dppo_kl": plain_dppo("dppo_kl"),
    "dro": plain_dro,
    "geo_mean": plain_geo_mean,
    "vespo": plain_vespo,
    "clip_cov": plain_clip_cov,
    "kl_cov": plain_kl_cov,
}


def plain_loss(
    name: str, leaf: torch.Tensor, batch: dict[str, torch.Tensor], keep: torch.Tensor, config: AlgorithmConfig
) -> torch.Tensor:
    """The loss by loops over kept tokens, with their weights."""
    columns = (leaf, batch["old"], batch["rollout"], batch["advantages"].tolist(), batch["weights"].tolist())
    all_tokens = {
        (row, place): tuple(column[row][place] for column in columns)
        for row in range(len(leaf))
        for place in range(leaf.shape[1])
        if keep[row, place]
    }
    chosen = plainly_chosen(name, all_tokens, config) if name in ("kl_cov", "clip_cov") else set()
    full = []
    for row in range(len(leaf)):
        tokens = [(*token, place in chosen) for place, token in all_tokens.items() if place[0] == row]
        if tokens:
            losses = PLAIN[name](tokens, config)
            weights = [1.0 if name in ("geo_mean", "vespo") else token[4] for token in tokens]
            full.append([weight * loss for weight, loss in zip(weights, losses, strict=True)])
    if config.aggregation == "token-sum":
        return sum(sum(row) for row in full)
    if config.aggregation == "token-mean":
        return sum(sum(row) for row in full) / sum(len(row) for row in full)
    if config.aggregation in ("seq-mean-token-mean", "prompt-mean"):  # each row answers a prompt of its own
        return sum(sum(row) / len(row) for row in full) / len(full)
    horizon = leaf.shape[1] if config.aggregation == "seq-mean-token-sum-norm" else 1
    return sum(sum(row) for row in full) / (len(full) * horizon)
