"""A teacher's scores of the policy's tokens, and how they change advantages and loss (docs/teacher.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from common.config import TeacherConfig
from common.config.sft import DemonstrationsConfig
from common.config.stages import LOG_RATIO_BOUND
from common.messages import InvalidMessage
from common.payload import Payload
from learner.stats import Stats


@dataclass(frozen=True, slots=True)
class TeacherScores:
    """A teacher's log-probs at the model tokens of a micro-batch.

    Attributes:
        scored: tokens that have scores, bool [N]; the values of the others are zeros.
        logprobs: of the token that the policy sampled, float32 [N]; or of the teacher's K likeliest, [N, K].
        ids: of the likeliest tokens, int64 [N, K]; None if the sampled ones were scored.
    """

    scored: torch.Tensor
    logprobs: torch.Tensor
    ids: torch.Tensor | None = None


def check_scores(ids: np.ndarray, top_k: int, vocabulary: int) -> None:
    """Raise `InvalidMessage` if a row's scores are not those that the configuration asks for.

    Args:
        ids: of the teacher's likeliest tokens, int32 [M, K]; empty if it scored the sampled tokens.
        top_k: likeliest tokens that `teacher.top_k` asks for.
        vocabulary: number of the model's token ids.
    """
    scored = ids.shape[1] if ids.size else 0
    if scored != top_k:
        what = f"its {scored} likeliest tokens" if scored else "the sampled token"
        raise InvalidMessage(f"the teacher scored {what} at each position, but teacher.top_k = {top_k}")
    if not scored:
        return
    if ids.max() >= vocabulary:
        raise InvalidMessage(f"the teacher scored token id {ids.max()}, but the model has {vocabulary} ids")
    ascending = np.sort(ids, axis=1)
    if (ascending[:, 1:] == ascending[:, :-1]).any():
        raise InvalidMessage("the teacher lists the same token twice among its likeliest at one position")


def scores_of_rows(rows: Sequence[Payload], top_k: int, device: torch.device | str) -> TeacherScores | None:
    """A teacher's scores of the rows' model tokens; None if no row has any."""
    taught = [row for row in rows if len(row.teacher_logprobs)]
    if not taught:
        return None
    scored = np.concatenate([np.full(len(row.logprobs), len(row.teacher_logprobs) > 0) for row in rows])

    def at_scored(values: Sequence[np.ndarray], dtype: type) -> torch.Tensor:
        whole: np.ndarray = np.zeros((len(scored), max(top_k, 1)), dtype)
        whole[scored] = np.concatenate(values)
        return torch.from_numpy(whole).to(device)

    logprobs = at_scored([row.teacher_logprobs for row in taught], np.float32)
    if not top_k:
        return TeacherScores(torch.from_numpy(scored).to(device), logprobs[:, 0])
    ids = at_scored([row.teacher_ids for row in taught], np.int64)
    return TeacherScores(torch.from_numpy(scored).to(device), logprobs, ids)


def weight_at(config: TeacherConfig | DemonstrationsConfig, version: int) -> float:
    """The weight of the teacher's or the demonstrations' loss at a version: linear to 0 over `decay_steps`, if set."""
    return config.weight * (1.0 if config.decay_steps is None else max(0.0, 1 - version / config.decay_steps))


def log_ratio(logprobs: torch.Tensor, scores: TeacherScores) -> torch.Tensor:
    """log pi - log pi_T at each sampled token [N], clipped: a one-sample estimate of the reverse KL."""
    return (logprobs - scores.logprobs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def taught_advantages(
    advantages: torch.Tensor,
    old: torch.Tensor,
    scores: TeacherScores | None,
    config: TeacherConfig | None,
    version: int,
) -> torch.Tensor:
    """The advantages [N] for the policy loss; those of scored tokens become A - w (log pi_old - log pi_T).

    This holds for the form `advantage`; with the form `loss` the advantages are unchanged. Without `teacher.reward`, A
    is 0 at scored tokens. Tokens without scores always keep the advantage of the reward.

    Args:
        advantages: the reward's [N].
        old: log pi_old [N].
        config: None if the run has no teacher.
    """
    if scores is None or config is None:
        return advantages
    taught = advantages if config.reward else torch.zeros_like(advantages)
    if config.form == "advantage":
        taught = taught - weight_at(config, version) * log_ratio(old, scores)
    return torch.where(scores.scored, taught, advantages)


def coarse_kl(policy: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Reverse KL of two distributions of K + 1 outcomes [N], with gradient: K tokens, and all others together.

    By the data-processing inequality it is at most the KL of the whole distributions, and equal to it if the K tokens
    are the whole vocabulary. The others' probability, in either distribution, is at least the type's resolution, so
    that logarithm and gradient stay finite if the K tokens have all of the probability.

    Args:
        policy, teacher: log-probs of the same K tokens [N, K].
    """
    p, q = policy.exp(), teacher.exp()
    least = torch.finfo(policy.dtype).eps
    others_p, others_q = ((1 - mass.sum(-1)).clamp(min=least) for mass in (p, q))
    return (p * (policy - teacher)).sum(-1) + others_p * (others_p.log() - others_q.log())


def teacher_statistics(
    logprobs: torch.Tensor,
    likeliest: torch.Tensor | None,
    old: torch.Tensor,
    keep: torch.Tensor,
    scores: TeacherScores | None,
    config: TeacherConfig,
    version: int,
    stats: Stats,
) -> None:
    """Report how far policy and teacher are apart, over the kept tokens that have scores.

    Args:
        logprobs, old: log pi_theta and log pi_old of the sampled tokens [N].
        likeliest: log pi_theta of the teacher's likeliest tokens [N, K], if it scored those.
    """
    names = ["kl", "mass", "policy_mass"] if config.top_k else ["kl", "logprob", "policy_logprob"]
    if config.form == "advantage":
        names.append("advantage")
    if scores is None:
        scored, values = torch.zeros_like(keep), [torch.zeros_like(logprobs)] * len(names)
    elif likeliest is not None:
        scored, masses = keep & scores.scored, (scores.logprobs.exp().sum(-1), likeliest.exp().sum(-1))
        values = [coarse_kl(likeliest, scores.logprobs), *masses]
    else:
        scored, values = keep & scores.scored, [log_ratio(logprobs, scores), scores.logprobs, logprobs]
        if config.form == "advantage":
            values.append(weight_at(config, version) * log_ratio(old, scores).abs())
    stats.total("scored_tokens", scored)
    stats.mean("teacher/tokens", scored, over="learned_tokens")
    by_name = {f"teacher/{name}": one.to(logprobs.dtype) for name, one in zip(names, values, strict=True)}
    stats.means(by_name, over="scored_tokens", where=scored)
