"""A plain second learner: one forward a sample, whole softmaxes, padded rows, no ranks and no DeepSpeed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from common.config import Config, CorrectionConfig
from common.payload import Payload
from learner.batch.demonstrations import numbers_at
from learner.batch.outcome import Advantage, token_advantages
from learner.batch.teacher import weight_at
from learner.correction import Correction, correct
from learner.losses import Denominators, aggregate, policy_loss
from learner.step_loss import reference_kl, sure_negatives
from tests.support.learner import DEMONSTRATIONS, make_demonstrations

Gradients = dict[str, torch.Tensor]
Samples = tuple[list[Payload], Sequence[Advantage]]


def padded(values: Sequence[torch.Tensor | np.ndarray]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.as_tensor(value) for value in values], batch_first=True)


class PaddedRows:
    """Samples in padded rows [B, T]: what was generated, by which version, and what it was worth.

    The model tokens of a sample of several rows are one after another.
    """

    def __init__(self, payloads: list[Payload], advantages: Sequence[Advantage]) -> None:
        self.payloads = payloads
        self.rollout = padded([payload.logprobs.copy() for payload in payloads])
        self.versions = padded([payload.versions().astype(np.int64) for payload in payloads])
        self.advantages = padded([token_advantages(*sample) for sample in zip(payloads, advantages, strict=True)])
        self.mask = padded([np.ones(len(payload.logprobs), bool) for payload in payloads])

    def taught(self, policy: PreTrainedModel, temperature: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Which model tokens a teacher scored; its log-prob of each, and the reverse KL of the K + 1 outcomes there."""
        scored, sampled, kl = [], [], []
        for payload in self.payloads:
            has, count = len(payload.teacher_logprobs) > 0, len(payload.logprobs)
            of_teacher = torch.from_numpy(payload.teacher_logprobs) if has else torch.zeros(count, 1)
            scored.append(torch.full((count,), has))
            sampled.append(of_teacher[:, 0])
            if not payload.teacher_ids.size:
                kl.append(torch.zeros(count))
                continue
            log_p = torch.cat(
                [self.log_softmax(policy, row, temperature)[:-1][row.mask()[1:]] for row in payload.rows()]
            )
            ids = torch.from_numpy(payload.teacher_ids.astype(np.int64))
            others = log_p.scatter(1, ids, -torch.inf).logsumexp(1)
            rest = torch.log1p(-of_teacher.exp().sum(1))
            kl.append((log_p.gather(1, ids).exp() * (log_p.gather(1, ids) - of_teacher)).sum(1))
            kl[-1] = kl[-1] + others.exp() * (others - rest)
        return padded(scored), padded(sampled), padded(kl)

    def answers(self, policy: PreTrainedModel, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and entropies of the model tokens, by a plain forward of each row and a whole log-softmax."""
        logprobs, entropies = [], []
        for payload in self.payloads:
            of_rows = [self.answer(policy, row, temperature) for row in payload.rows()]
            for values, of_row in zip((logprobs, entropies), zip(*of_rows, strict=True), strict=True):
                values.append(torch.cat(of_row))
        return padded(logprobs), padded(entropies)

    def answer(self, policy: PreTrainedModel, row: Payload, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.from_numpy(row.token_ids.astype(np.int64))
        log_p = self.log_softmax(policy, row, temperature)
        at = torch.from_numpy(np.flatnonzero(row.mask()))
        return log_p[at - 1].gather(1, ids[at][:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)[at - 1]

    def log_softmax(self, policy: PreTrainedModel, row: Payload, temperature: float) -> torch.Tensor:
        """Log-probs of what follows each token [T, V]."""
        ids = torch.from_numpy(row.token_ids.astype(np.int64))[None]
        return (policy(input_ids=ids).logits[0].float() / temperature).log_softmax(-1)


def plain_loss(
    policy: PreTrainedModel,
    rows: PaddedRows,
    config: Config,
    version: int,
    done: float,
    recomputed: torch.Tensor,
    frozen: PreTrainedModel | None,
    weight_mean: float,
) -> torch.Tensor:
    """The loss of one optimizer step, divided by what its correction leaves (with SkyRL's block, by all)."""
    algorithm, temperature = config.algorithm, config.generator.temperature
    logprobs, entropies = rows.answers(policy, temperature)
    ours, ages = logprobs.detach(), (version - rows.versions).clamp(min=0)
    share = ages / (ages + done).clamp(min=1e-6)
    old = {
        "rollout": rows.rollout,
        "recompute": recomputed,
        "interpolate": rows.rollout + share * (ours - rows.rollout),
    }[algorithm.proximal]
    nearer = ours if algorithm.proximal == "rollout" else old
    correction = correct(nearer, rows.rollout, rows.mask, not_normalised(config), version - rows.versions)
    advantages, teacher = rows.advantages, config.teacher
    if teacher.is_set:
        scored, of_sampled, kl = rows.taught(policy, temperature)
        taught = advantages * teacher.reward
        if teacher.form == "advantage":
            taught = taught - weight_at(teacher, version) * (old - of_sampled)
        advantages = torch.where(scored, taught, advantages)
    keep = correction.mask & ~sure_negatives(old, advantages, algorithm.negative_max_prob)
    weighs = algorithm.weighs_loss and correction.weights is not None
    weighted = Correction(correction.weights / weight_mean if weighs else None, keep)
    counted = rows.mask if algorithm.correction.skyrl else keep
    denominators = dataclasses.replace(Denominators.of(counted), horizon=float(config.episode.max_response_tokens))
    values = (logprobs, old, advantages, rows.mask)
    loss, _ = policy_loss(algorithm.loss, *values, algorithm, weighted, denominators, rows.rollout)
    if algorithm.entropy_coef:
        loss = loss - algorithm.entropy_coef * aggregate(entropies, keep, algorithm.aggregation, denominators)
    if teacher.form == "loss":
        distance = kl if teacher.top_k else (logprobs - of_sampled).square() / 2
        distance = torch.where(scored, distance, 0.0)
        distance = aggregate(distance, keep, algorithm.aggregation, denominators)
        loss = loss + weight_at(teacher, version) * distance
    if frozen is not None:
        gap = reference_kl(logprobs, rows.answers(frozen, temperature)[0].detach(), algorithm.kl_estimator)
        loss = loss + algorithm.kl_coef * aggregate(gap, keep, algorithm.aggregation, denominators)
    return loss


def demonstrated_loss(policy: PreTrainedModel, config: Config, version: int) -> torch.Tensor:
    """The loss of the demonstrations that the first optimizer step of a batch also learns from, with its weight."""
    mixed = config.algorithm.demonstrations
    size = mixed.batch_size
    rows, losses, weights = make_demonstrations(DEMONSTRATIONS), [], []
    for number in numbers_at(version * size, (version + 1) * size, len(rows), config.run.seed):
        row = rows[number]
        ids = torch.from_numpy(row.token_ids.astype(np.int64))[None]
        log_p = policy(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
        weights.append(torch.from_numpy(row.weights[1:]))
        losses.append(-weights[-1] * log_p.gather(1, ids[0, 1:, None])[:, 0])
    mean = torch.cat(losses).sum() / torch.cat(weights).sum()
    return mixed.weight * (1 - version / (mixed.decay_steps or math.inf)) * mean


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


def plain_model(path: str) -> PreTrainedModel:
    """A model in float32, which computes experts one by one if it has any."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    if model.config.architectures[0].endswith("MoeForCausalLM"):
        model.set_experts_implementation("eager")
    return model


def plain_training(config: Config, samples: Samples, version: int = 0) -> tuple[list[Gradients], Gradients]:
    """Gradients before every optimizer step that plain SGD takes on one batch, and the weights after the last."""
    policy = plain_model(config.model.path)
    algorithm, minis, frozen = config.algorithm, config.learner.mini_batches, None
    if algorithm.kl_coef:
        frozen = plain_model(algorithm.reference or config.model.path)
    optimizer = torch.optim.SGD(policy.parameters(), lr=config.learner.lr)
    payloads, advantages = samples
    size = len(payloads) // minis
    parts = [slice(start, start + size) for start in range(0, len(payloads), size)]
    held = [PaddedRows(payloads[part], advantages[part]) for part in parts]
    with torch.no_grad():
        recomputed = [rows.answers(policy, config.generator.temperature)[0] for rows in held]
    normalises = algorithm.correction.rollout_is_batch_normalize
    weight_mean = mean_of_weights(config, held, recomputed, version) if normalises else 1.0
    gradients = []
    for mini, rows in enumerate(held):
        optimizer.zero_grad()
        plain_loss(policy, rows, config, version, mini / minis, recomputed[mini], frozen, weight_mean).backward()
        if algorithm.demonstrations.data is not None:
            demonstrated_loss(policy, config, version).backward()
        gradients.append({name: parameter.grad.clone() for name, parameter in policy.named_parameters()})
        optimizer.step()
    return gradients, {name: parameter.detach() for name, parameter in policy.named_parameters()}


def assert_close_gradients(actual: Gradients, expected: Gradients, tolerance: float = 1e-5) -> None:
    """Each parameter's gradient is off by at most `tolerance` of its own norm."""
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = gradient.norm()
        assert scale > 0, name
        assert (actual[name] - gradient).norm() <= tolerance * scale, name
