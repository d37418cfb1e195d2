"""Policy losses a second time, from their formulas: loops over scalars, whose gradients autograd takes.

Those of single tokens that the originals' code has computed, in `tests/support/golden.py`, are not among them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from common.config import AlgorithmConfig
from common.config.algorithm import loss_options

Options = dict[str, Any]


class Token(NamedTuple):
    """Log-probs of the policy, of the proximal policy and of the generating one; whether a comparison chose it."""

    new: torch.Tensor
    old: torch.Tensor
    rollout: torch.Tensor
    advantage: float
    weight: float
    chosen: bool = False

    @property
    def ratio(self) -> torch.Tensor:
        return torch.exp(self.new - self.old)


def clip(value: Any, options: Options) -> Any:
    low, high = 1 - options["low"], 1 + options["high"]
    return low + 0 * value if value < low else high + 0 * value if value > high else value


def clipped(token: Token, options: Options) -> Any:
    return min(token.ratio * token.advantage, clip(token.ratio, options) * token.advantage)


def ppo_clip(token: Token, options: Options) -> Any:
    surrogate = clipped(token, options)
    return -surrogate if token.advantage >= 0 else -max(surrogate, options["cap"] * token.advantage + 0 * token.ratio)


def sapo(token: Token, options: Options) -> Any:
    tau = options["tau_pos" if token.advantage > 0 else "tau_neg"]
    return -token.advantage * (4 / tau) / (1 + torch.exp(-tau * (token.ratio - 1)))


def reinforce(token: Token, options: Options) -> Any:
    return -token.advantage * token.new


def double_sided(token: Token, options: Options) -> Any:
    inside = options["low"] <= math.exp(float((token.new - token.rollout).detach())) <= options["high"]
    return -token.advantage * token.ratio if inside else 0 * token.new


BY_TOKEN: dict[str, Callable[[Token, Options], Any]] = {
    "ppo_clip": ppo_clip,
    "cispo": lambda token, options: -clip(token.ratio.detach(), options) * token.advantage * token.new,
    "sapo": sapo,
    "reinforce": reinforce,
    "gpg": reinforce,
    "double_sided": double_sided,
    "importance_sampling": lambda token, options: -token.advantage * token.ratio,
    "clip_cov": lambda token, options: 0 * token.new if token.chosen else -clipped(token, options),
    "kl_cov": lambda token, options: (
        -token.advantage * token.ratio + (options["coef"] * abs(token.new - token.old) if token.chosen else 0)
    ),
}


def log_ratio(row: list[Token]) -> float:
    return sum(float((token.new - token.old).detach()) for token in row)


def gspo(row: list[Token], options: Options) -> list[Any]:
    value = math.exp(log_ratio(row) / len(row))
    ratios = [(value * torch.exp(token.new - token.new.detach()), token.advantage) for token in row]
    return [-min(ratio * advantage, clip(ratio, options) * advantage) for ratio, advantage in ratios]


def geo_mean(row: list[Token], options: Options) -> list[Any]:
    held = []
    for token in row:
        x, bound = token.new - token.old, 0.4 if token.advantage > 0 else -0.4
        held.append(0 * x + bound if (x > bound if token.advantage > 0 else x < bound) else x)
    weight = math.exp(sum(math.log(token.weight + 1e-10) for token in row) / len(row))
    mean = sum(token.advantage for token in row) / len(row)
    return [-mean * weight * torch.exp(sum(held) / len(row))] * len(row)


def vespo(row: list[Token], options: Options) -> list[Any]:
    # The weights are those of rows, as in the recommended correction.
    log_w = log_ratio(row) + sum(max(math.log(token.weight), math.log(1e-8)) for token in row) / len(row)
    log_w = min(max(log_w, math.log(1e-8)), 20.0)
    results = []
    for token in row:
        k, rate = (2.0, 3.0) if token.advantage >= 0 else (3.0, 2.0)
        results.append(math.exp(rate + k * log_w - rate * math.exp(log_w)) * reinforce(token, options))
    return results


BY_ROW = {"gspo": gspo, "geo_mean": geo_mean, "vespo": vespo}
PLAIN = (*BY_TOKEN, *BY_ROW)


def plainly_chosen(name: str, tokens: dict[tuple[int, int], Token], options: Options) -> set[tuple[int, int]]:
    """The places that a loss chooses among all kept tokens."""
    log_mean = sum(float(token.new.detach()) for token in tokens.values()) / len(tokens)
    mean = sum(token.advantage for token in tokens.values()) / len(tokens)
    covariances = {
        place: (token.advantage - mean) * (float(token.new.detach()) - log_mean) for place, token in tokens.items()
    }
    if name == "kl_cov":
        count = max(1, int(options["ratio"] * len(tokens)))
        return set(sorted(tokens, key=lambda place: -covariances[place])[:count])
    chosen = set()
    for place, token in tokens.items():
        binds = clipped(token, options) < token.ratio * token.advantage
        if not binds and options["cov_low"] < covariances[place] < options["cov_high"]:
            chosen.add(place)
    return chosen


def plain_loss(
    name: str, leaf: torch.Tensor, batch: dict[str, torch.Tensor], keep: torch.Tensor, config: AlgorithmConfig
) -> torch.Tensor:
    """The loss by loops over kept tokens, with their weights."""
    options = loss_options(config.loss, config)
    columns = (leaf, batch["old"], batch["rollout"], batch["advantages"].tolist(), batch["weights"].tolist())
    tokens = {
        (row, place): Token(*(column[row][place] for column in columns)) for row, place in keep.nonzero().tolist()
    }
    chosen = plainly_chosen(name, tokens, options) if name in ("kl_cov", "clip_cov") else set()
    full = []
    for row in range(len(leaf)):
        own = [token._replace(chosen=place in chosen) for place, token in tokens.items() if place[0] == row]
        if not own:
            continue
        losses = BY_ROW[name](own, options) if name in BY_ROW else [BY_TOKEN[name](token, options) for token in own]
        weights = [1.0 if name in ("geo_mean", "vespo") else token.weight for token in own]
        full.append([weight * loss for weight, loss in zip(weights, losses, strict=True)])
    if config.aggregation == "token-sum":
        return sum(sum(row) for row in full)
    if config.aggregation == "token-mean":
        return sum(sum(row) for row in full) / sum(len(row) for row in full)
    if config.aggregation in ("seq-mean-token-mean", "prompt-mean"):  # each row answers a prompt of its own
        return sum(sum(row) / len(row) for row in full) / len(full)
    horizon = leaf.shape[1] if config.aggregation == "seq-mean-token-sum-norm" else 1
    return sum(sum(row) for row in full) / (len(full) * horizon)
