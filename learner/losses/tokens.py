"""The input and the output of a policy loss: values of the model tokens [N] of several rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from common.config import AlgorithmConfig
from common.config.stages import LOG_RATIO_BOUND
from learner.batch.layout import Layout


@dataclass(frozen=True, slots=True)
class PolicyTokens:
    """The input of a loss. Values of tokens outside `of_means` are zero.

    Attributes:
        logprobs: log pi_theta, with gradient [N].
        old_logprobs: log pi_old [N].
        rollout_logprobs: log pi_rollout [N].
        advantages: [N].
        keep: tokens that take part, bool [N].
        of_means: tokens over which row means are taken, bool [N]: those of `keep`; with `algorithm.correction.skyrl`,
            which never renormalises, all with finite log-probs.
        layout: rows of the tokens.
        weights: importance weights [N], zero where not kept; None if tokens are not weighted. They are multiplied into
            the losses afterwards, except losses of whole rows.
        chosen: the tokens that a comparison with all of the mini-batch has chosen, bool [N]; if None, these tokens are
            the whole mini-batch, and the loss compares them itself.
    """

    logprobs: torch.Tensor
    old_logprobs: torch.Tensor
    rollout_logprobs: torch.Tensor
    advantages: torch.Tensor
    keep: torch.Tensor
    of_means: torch.Tensor
    layout: Layout
    weights: torch.Tensor | None = None
    chosen: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        *,
        logprobs: torch.Tensor,
        old: torch.Tensor,
        rollout: torch.Tensor,
        advantages: torch.Tensor,
        keep: torch.Tensor,
        layout: Layout,
        config: AlgorithmConfig,
        weights: torch.Tensor | None = None,
        chosen: torch.Tensor | None = None,
    ) -> PolicyTokens:
        """Zero unused values before anything is computed from them, so that NaN reaches neither loss nor gradient."""
        of_means = keep if config.correction.renormalizes else old.isfinite() & rollout.isfinite()
        logprobs, old, rollout, advantages = (
            torch.where(of_means, values, 0.0) for values in (logprobs, old, rollout, advantages)
        )
        return cls(logprobs, old, rollout, advantages, keep, of_means, layout, weights, chosen)

    @property
    def log_ratio(self) -> torch.Tensor:
        """log pi_theta - log pi_old [N]."""
        return self.logprobs - self.old_logprobs

    def row_mean(self, values: torch.Tensor) -> torch.Tensor:
        """Mean of values [N] over each row's tokens [B]; 0 for a row without any."""
        return self.layout.mean_where(values, self.of_means)


# The loss of each token [N], and its metrics: values of each token [N] by name.
TokenLosses = tuple[torch.Tensor, dict[str, torch.Tensor]]
TokenLoss = Callable[[PolicyTokens, AlgorithmConfig], TokenLosses]


def bounded_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp(clip(log_ratio, +-20))."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def clipped(
    ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """-A ratio, the same with the ratio clipped to [1 - low, 1 + high], and metrics of where the clip binds."""
    plain = -advantages * ratio
    held = -advantages * ratio.clamp(1 - low, 1 + high)
    binds = held > plain
    return (
        plain,
        held,
        {
            "actor/pg_clipfrac": binds,
            "actor/clip_low": binds & (ratio < 1),
            "actor/clip_high": binds & (ratio > 1),
        },
    )
