"""Describes a configuration's off-policy correction in words, with every bound as the ratios it lets through."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

from common.config import AGE_BUCKETS, AlgorithmConfig, Config, CorrectionConfig
from common.config.algorithm import loss_options
from common.config.losses import SPECS, spec_of
from common.config.stages import Mask
from common.config.warnings import algorithm_warnings

PROXIMAL = {
    "recompute": "recompute: pi_old is the learner's policy at the start of the batch",
    "rollout": "rollout (bypass): pi_old is the policy that generated the tokens",
    "interpolate": "interpolate: log pi_old lies between the generating and the current policy, by the age of each "
    "token's weights (A-3PO)",
    "compare": "compare: pi_old is recomputed, and the error of the interpolated one is reported (proximal/...)",
}
AGGREGATION = {
    "token-mean": "the mean over tokens",
    "seq-mean-token-sum": "the mean over rows of their token sums",
    "seq-mean-token-mean": "the mean over rows of their token means",
    "seq-mean-token-sum-norm": "the mean over rows of their token sums, divided by episode.max_response_tokens",
    "token-sum": "the sum over tokens",
    "prompt-mean": "the mean over prompts of the mean over all tokens of their responses",
}


def explain(config: Config) -> list[tuple[str, list[str]]]:
    """The explanation: titles, each with its lines."""
    algorithm = config.algorithm
    return [
        ("preset", [_preset(algorithm.correction)]),
        ("proximal policy", [PROXIMAL[algorithm.proximal]]),
        ("importance weights", list(_weights(algorithm))),
        ("rejection", list(_rejection(algorithm))),
        ("loss", list(_loss(algorithm))),
        ("extra forward passes", list(_passes(config))),
        ("settings without effect", algorithm_warnings(config) or ["none"]),
    ]


def _preset(correction: CorrectionConfig) -> str:
    """The preset's name, and the fields that differ from it."""
    if correction.preset_name is None:
        return "none; the fields are spelled out"
    plain = CorrectionConfig.preset(correction.preset_name)
    names = [name for name in type(plain).model_fields if getattr(plain, name) != getattr(correction, name)]
    beside = ", ".join(f"{name} = {getattr(correction, name)!r}" for name in names)
    return f"{correction.preset_name}, with {beside}" if beside else correction.preset_name


def _weights(algorithm: AlgorithmConfig) -> Iterator[str]:
    correction, ratio = algorithm.correction, _ratio(algorithm)
    weight = correction.weight
    if weight is None:
        yield "none"
        return
    level, limit = weight.level, weight.upper
    product = ratio if level == "token" else f"the product of the row's {ratio}"
    if weight.zero_outside:
        what = f"{product}, 0 outside [{weight.lower:g}, C]"
    else:
        what = f"min({product.removeprefix('the ')}, C)"
    if algorithm.weighs_loss:
        yield f"each token's loss is multiplied by {what}, C = {limit:g}"
    else:
        yield f"{what}, C = {limit:g}, is only measured: the loss already contains the ratio pi_theta / pi_rollout"
    if correction.rollout_is_batch_normalize:
        of = "tokens" if level == "token" else "rows"
        yield f"the weights are divided by their mean over all {of} of the batch, on all ranks, at its start"
    yield from _by_age(correction, "C", level == "sequence", lambda factor: f"{limit**factor:.6g}")


def _rejection(algorithm: AlgorithmConfig) -> Iterator[str]:
    correction, ratio = algorithm.correction, _ratio(algorithm)
    for mask in dict.fromkeys(correction.masks):
        yield mask_words(mask, ratio)
        if mask.by_age:
            yield from _by_age(correction, "bounds", mask.of_rows, partial(_bound_at, mask))
    if correction.m2_threshold is not None:
        yield (
            f"the tokens of the mini-batch with the largest (log {ratio})^2 are left out, until the mean of the others "
            f"is below {correction.m2_threshold:g}"
        )
    if not correction.masks and correction.m2_threshold is None:
        if algorithm.negative_max_prob == 1:
            yield "none"
    elif correction.skyrl is not None:
        yield "each rule sees only what earlier rules kept; the loss keeps the denominator from before rejection"
    else:
        yield "the loss is divided by the tokens (or rows) that are left; if none is left, the step is skipped"
    if algorithm.negative_max_prob < 1:
        yield (
            "in samples with a negative advantage, tokens that pi_old gives a probability above "
            f"{algorithm.negative_max_prob:g} are left out"
        )


def mask_words(mask: Mask, ratio: str) -> str:
    """What a mask drops, e.g. `rows whose product of pi_old / pi_rollout leaves [0.5, 2] are dropped`."""
    if mask.estimator == "k1":
        leaves = _leaves(math.exp(-mask.upper), math.exp(-mask.lower))
        return {
            "token": f"tokens whose {ratio} {leaves} are left out",
            "any": f"rows with any token whose {ratio} {leaves} are dropped",
            "sum": f"rows whose product of {ratio} {leaves} are dropped",
            "mean": f"rows whose geometric mean of {ratio} {leaves} are dropped",
        }[mask.level]
    name, limit = mask.estimator, f"{mask.upper:g}"
    formula = "x^2 / 2" if name == "k2" else "e^x - 1 - x"
    leaves = _leaves(*divergence_band(name, mask.upper))
    return {
        "token": f"tokens whose {ratio} {leaves} are left out ({name} = {formula} above {limit})",
        "max": f"rows with any token whose {ratio} {leaves} are dropped ({name} = {formula} above {limit})",
        "sum": f"rows whose sum of {name} = {formula} exceeds {limit} are dropped; one token alone does when its "
        f"{ratio} {leaves}",
        "mean": f"rows whose mean {name} = {formula} exceeds {limit} are dropped; if all tokens are alike, those "
        f"whose {ratio} {leaves}",
    }[mask.level]


def divergence_band(estimator: str, limit: float) -> tuple[float, float]:
    """Ratios e^x between which k2 = x^2 / 2 or k3 = e^x - 1 - x stays at or below `limit`."""
    if estimator == "k2":
        reach = math.sqrt(2 * limit)
        return math.exp(-reach), math.exp(reach)
    # k3 falls to 0 at x = 0 and rises again; e^x > 0 bounds the left root, and k3 >= x^2 / 2 for x > 0 the right.
    return math.exp(-_root(limit, -1.0, limit + 1)), math.exp(_root(limit, 1.0, math.sqrt(2 * limit)))


def _root(limit: float, sign: float, reach: float) -> float:
    """The distance from 0 at which k3 reaches `limit` on one side, by bisection."""
    low, high = 0.0, reach
    for _ in range(100):
        middle = (low + high) / 2
        x = sign * middle
        low, high = (middle, high) if math.expm1(x) - x <= limit else (low, middle)
    return low


def _loss(algorithm: AlgorithmConfig) -> Iterator[str]:
    words = loss_words(algorithm)
    old = "pi_rollout" if algorithm.proximal == "rollout" else "pi_old"
    yield f"{words}; r = pi_theta / {old}" if spec_of(algorithm.loss).has_ratio else words
    if algorithm.turn_advantage == "turn":
        yield "A is the advantage of the token's turn: the rewards from this turn on, minus the prompt's value"
    yield f"added up as {AGGREGATION[algorithm.aggregation]}, over all ranks and micro-batches"
    if algorithm.kl_coef:
        of = algorithm.reference or "model.path"
        yield f"plus {algorithm.kl_coef:g} times the KL to the reference policy {of} ({algorithm.kl_estimator})"
    if algorithm.entropy_coef:
        yield f"minus {algorithm.entropy_coef:g} times the entropy"
    if algorithm.ess_lr != "none":
        root = "the root of " if algorithm.ess_lr == "sqrt" else ""
        yield f"the learning rate is multiplied by {root}the weights' effective sample size, between 0 and 1"


def loss_words(algorithm: AlgorithmConfig) -> str:
    """The loss of a token, with the numbers of its options, e.g. `kl_cov: -A r, plus 1 |log r| for ...`."""
    if algorithm.loss not in SPECS:
        return f"{algorithm.loss}: a loss of your own"
    options = loss_options(algorithm.loss, algorithm)
    words = {name: f"{value:g}" for name, value in options.items()}
    if "low" in options:
        words["clip"] = f"clip(r, {1 - options['low']:g}, {1 + options['high']:g})"
    return f"{algorithm.loss}: {SPECS[algorithm.loss].formula.format_map(words)}"


def _passes(config: Config) -> Iterator[str]:
    algorithm, minis = config.algorithm, config.learner.mini_batches
    passes = []
    if algorithm.proximal in ("recompute", "compare") and minis > 1:
        passes.append(
            f"pi_old of {minis - 1} of the {minis} mini-batches (the training pass of the first one computes its own)"
        )
    if algorithm.correction.rollout_is_batch_normalize:
        covers = "the first mini-batch" if passes else "the batch"
        passes.append(f"the weights' mean, over {covers}")
    if algorithm.correction.m2_threshold is not None or spec_of(algorithm.loss).compares:
        passes.append("a comparison of all tokens of each mini-batch, unless one rank has it in one micro-batch")
    if algorithm.kl_coef:
        passes.append("the reference policy, once per mini-batch")
    yield from passes or ["none"]


def _by_age(correction: CorrectionConfig, what: str, of_rows: bool, bound: Callable[[float], str]) -> Iterator[str]:
    """One line with the bound at every age, if there is a schedule."""
    if correction.thresholds_by_age is None:
        return
    ages = [name.removeprefix("age_").replace("_plus", "+").replace("_", "-") for name in AGE_BUCKETS]
    parts = [f"{bound(factor)} at {age}" for age, factor in zip(ages, correction.thresholds_by_age, strict=True)]
    of = "the row's oldest token" if of_rows else "the token"
    yield f"{what} by the age of {of}, in versions: {', '.join(parts)}"


def _bound_at(mask: Mask, factor: float) -> str:
    if mask.estimator == "k1":
        return f"[{math.exp(-mask.upper * factor):.6g}, {math.exp(-mask.lower * factor):.6g}]"
    return f"{mask.upper * factor:.6g}"


def _ratio(algorithm: AlgorithmConfig) -> str:
    """The ratio that is corrected; in bypass mode it has the current policy in place of pi_old."""
    return "pi_theta / pi_rollout" if algorithm.proximal == "rollout" else "pi_old / pi_rollout"


def _leaves(low: float, high: float) -> str:
    if math.isinf(high):
        return f"is below {low:.6g}"
    return f"leaves [{low:.6g}, {high:.6g}]" if low > 0 else f"is above {high:.6g}"
