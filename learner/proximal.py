"""The proximal policy pi_old, around which losses clip: recomputed, the generating one, or between the two."""

from __future__ import annotations

import torch


def interpolated(
    logprobs: torch.Tensor, rollout: torch.Tensor, versions: torch.Tensor, proximal: int, current: float
) -> torch.Tensor:
    """log pi_old between the generating and the current policy, by each token's weight version [N].

    log pi_old = log pi_rollout + a (log pi_theta - log pi_rollout), a = (v_old - v_tok) / (v_theta - v_tok), and 0
    where v_theta = v_tok (A-3PO, arXiv 2512.06547). Before the batch's first optimizer step v_theta = v_old, so
    that a = 1 gives the recomputed policy itself; after m of M steps v_theta = v_old + m / M.

    Args:
        logprobs: log pi_theta, taken as constant [N].
        rollout: log pi_rollout [N].
        versions: version of the weights that sampled each token, int64 [N].
        proximal: v_old, the version at the start of the batch.
        current: v_theta.
    """
    age = (proximal - versions).clamp(min=0).to(logprobs.dtype)
    distance = age + (current - proximal)
    share = torch.where(distance > 0, age / distance.clamp(min=1e-6), 0.0)
    return rollout + share * (logprobs.detach() - rollout)
