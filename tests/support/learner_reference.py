"""The learner once more, plainly: one forward a sample, whole softmaxes, padded rows, no ranks and no DeepSpeed."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from transformers import Qwen3ForCausalLM

from common.config import Config, CorrectionConfig
from common.payload import Payload
from learner.correction import Correction, correct
from learner.losses import Denominators, aggregate, policy_loss
from learner.step_loss import reference_kl, sure_negatives
from tests.support.learner import reference_logprobs

Gradients = dict[str, torch.Tensor]


@dataclasses.dataclass
class PaddedRows:
    """Samples in padded rows [B, T]: what was generated, by whom, and what it was worth."""

    payloads: list[Payload]
    rollout: torch.Tensor
    versions: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor

    @classmethod
    def of(cls, payloads: list[Payload], advantages: list[float]) -> PaddedRows:
        mask = padded([torch.ones(len(payload.logprobs)) for payload in payloads]).bool()
        return cls(
            payloads,
            padded([torch.from_numpy(payload.logprobs.copy()) for payload in payloads]),
            padded([torch.from_numpy(payload.versions().astype("int64")) for payload in payloads]),
            torch.tensor(advantages)[:, None].expand_as(mask),
            mask,
        )

    def logprobs(self, policy: Qwen3ForCausalLM, config: Config) -> torch.Tensor:
        temperature = config.generator.temperature
        return padded([reference_logprobs(policy, payload, temperature) for payload in self.payloads])

    def entropies(self, policy: Qwen3ForCausalLM) -> torch.Tensor:
        """At the places the model tokens are predicted from; temperature 1."""
        found = []
        for payload in self.payloads:
            ids = torch.from_numpy(payload.token_ids.astype("int64"))[None]
            log_p = policy(input_ids=ids).logits[0].log_softmax(-1)
            at = torch.from_numpy(payload.mask().nonzero()[0]) - 1
            found.append(-(log_p.exp() * log_p).sum(-1)[at])
        return padded(found)


def padded(values: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(values, batch_first=True)


def plain_loss(
    policy: Qwen3ForCausalLM,
    rows: PaddedRows,
    config: Config,
    version: int,
    done: float,
    recomputed: torch.Tensor,
    frozen: Qwen3ForCausalLM | None,
    weight_mean: float = 1.0,
) -> torch.Tensor:
    """The loss of one optimizer step, divided by what its correction leaves (with SkyRL's block, by all)."""
    algorithm = config.algorithm
    logprobs = rows.logprobs(policy, config)
    ours = logprobs.detach()
    ages = (version - rows.versions).clamp(min=0)
    share = ages / (ages + done).clamp(min=1e-6)
    old = {
        "rollout": rows.rollout,
        "recompute": recomputed,
        "compare": recomputed,
        "interpolate": rows.rollout + share * (ours - rows.rollout),
    }[algorithm.proximal]
    nearer = ours if algorithm.proximal == "rollout" else old
    found = correct(nearer, rows.rollout, rows.mask, not_normalised(config), version - rows.versions)
    keep = found.mask & ~sure_negatives(old, rows.advantages, algorithm.negative_max_prob)
    weights = found.weights / weight_mean if algorithm.weighs_loss and found.weights is not None else None
    counted = rows.mask if algorithm.correction.skyrl else keep
    horizon = float(config.episode.max_response_tokens)
    denominators = dataclasses.replace(Denominators.of(counted), horizon=horizon)
    loss, _ = policy_loss(
        algorithm.loss,
        logprobs,
        old,
        rows.advantages,
        rows.mask,
        algorithm,
        Correction(weights, keep),
        denominators,
        rows.rollout,
    )
    if algorithm.entropy_coef:
        entropies = rows.entropies(policy)
        loss = loss - algorithm.entropy_coef * aggregate(entropies, keep, algorithm.aggregation, denominators)
    if frozen is not None:
        gap = reference_kl(logprobs, rows.logprobs(frozen, config).detach(), algorithm.kl_estimator)
        loss = loss + algorithm.kl_coef * aggregate(gap, keep, algorithm.aggregation, denominators)
    return loss


def not_normalised(config: Config) -> CorrectionConfig:
    return config.algorithm.correction.model_copy(update={"rollout_is_batch_normalize": False})


def mean_of_weights(config: Config, parts: list[PaddedRows], logprobs: list[torch.Tensor], version: int) -> float:
    """Mean of the importance weights of a whole batch, by token or by row, before its first step."""
    weights = []
    for rows, old in zip(parts, logprobs, strict=True):
        correction = correct(old, rows.rollout, rows.mask, not_normalised(config), version - rows.versions)
        assert correction.weights is not None
        by_row = config.algorithm.correction.rollout_is == "sequence"
        weights.append(correction.weights.amax(1) if by_row else correction.weights[rows.mask])
    return float(torch.cat(weights).mean())


def plain_training(
    config: Config, batches: dict[int, tuple[list[Payload], list[float]]]
) -> tuple[list[Gradients], Any]:
    """Gradients before every optimizer step of plain SGD, and the policy after the last.

    Args:
        batches: payloads and advantages by the version they are trained on by.
    """
    policy = Qwen3ForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    algorithm, minis = config.algorithm, config.learner.mini_batches
    frozen = None
    if algorithm.kl_coef:
        frozen = Qwen3ForCausalLM.from_pretrained(algorithm.reference or config.model.path, dtype=torch.float32)
    optimizer = torch.optim.SGD(policy.parameters(), lr=config.learner.lr)
    gradients = []
    for version, (payloads, advantages) in batches.items():
        size = len(payloads) // minis
        parts = [slice(start, start + size) for start in range(0, len(payloads), size)]
        held = [PaddedRows.of(payloads[part], advantages[part]) for part in parts]
        with torch.no_grad():
            recomputed = [rows.logprobs(policy, config) for rows in held]
        normalises = algorithm.correction.rollout_is_batch_normalize
        weight_mean = mean_of_weights(config, held, recomputed, version) if normalises else 1.0
        for mini, rows in enumerate(held):
            optimizer.zero_grad()
            plain_loss(policy, rows, config, version, mini / minis, recomputed[mini], frozen, weight_mean).backward()
            gradients.append({name: parameter.grad.clone() for name, parameter in policy.named_parameters()})
            optimizer.step()
    return gradients, policy


def plain_gradients(config: Config, batch: tuple[list[Payload], list[float]], version: int = 0) -> Gradients:
    """The gradient of the first optimizer step."""
    return plain_training(config, {version: batch})[0][0]


def assert_close_gradients(found: Gradients, expected: Gradients, tolerance: float = 1e-5) -> None:
    """Each parameter's gradient is off by at most `tolerance` of its own norm."""
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = gradient.norm()
        assert scale > 0, name
        assert (found[name] - gradient).norm() <= tolerance * scale, (
            f"{name}: {(found[name] - gradient).norm() / scale:.1e}"
        )
