"""The user's own losses: finds one by its name, tries it on a few tokens, and refuses it with a one-line error."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from common.config import AlgorithmConfig
from common.config.algorithm import loss_options
from common.errors import UserError
from common.parts import LOSS
from learner.batch.layout import Layout
from learner.losses.policy_loss import LOSSES
from learner.losses.tokens import PolicyTokens, TokenLoss, TokenLosses


def load_loss(config: AlgorithmConfig) -> TokenLoss:
    """The loss, ready to be called with (tokens, config).

    Raises:
        UserError: it cannot be found or imported, does not take `algorithm.loss_options`, or does not give one finite
            number per token that depends on the policy.
    """
    own = LOSS.load(config.loss, LOSSES, {} if config.loss in LOSSES else config.loss_options)
    if config.loss in LOSSES:
        try:
            loss_options(config.loss, config)
        except ValueError as error:
            raise UserError(str(error)) from None
        return own
    field = f"{LOSS.key} = {config.loss!r}"
    own = partial(_call, own, field)
    _try(own, config, field)
    return own


def _call(loss: Any, field: str, tokens: PolicyTokens, config: AlgorithmConfig) -> TokenLosses:
    """Call a user's loss; it need not return metrics, and those without a prefix get `actor/`."""
    returned = loss(tokens, config)
    losses, metrics = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
    if not isinstance(losses, torch.Tensor) or losses.shape != tokens.logprobs.shape:
        shape = list(losses.shape) if isinstance(losses, torch.Tensor) else type(losses).__name__
        raise UserError(
            f"{field} must return the loss of each token, a tensor {list(tokens.logprobs.shape)}, alone or with a dict "
            f"of metrics; it returned {shape}"
        )
    if not isinstance(metrics, Mapping):
        raise UserError(f"{field} must return the metrics as a dict by name; it returned {type(metrics).__name__}")
    for name, values in metrics.items():
        if not isinstance(name, str):
            raise UserError(f"{field}: the name of the metric {name!r} must be text, not {type(name).__name__}")
        if not isinstance(values, torch.Tensor) or values.shape != losses.shape:
            raise UserError(f"{field}: the metric {name!r} must be one number for each token, {list(losses.shape)}")
    return losses, {name if "/" in name else f"actor/{name}": values for name, values in metrics.items()}


def _try(loss: TokenLoss, config: AlgorithmConfig, field: str) -> None:
    """Call the loss with a few tokens, and check its result and its gradient."""
    logprobs = torch.tensor([-0.1, -2.0, -1.0, -3.0, -0.5, -1.5], requires_grad=True)
    old = torch.tensor([-0.2, -1.0, -1.0, -4.0, -0.5, -1.6])
    advantages = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0])
    keep = torch.tensor([True, True, False, True, True, True])
    # The second row has no token.
    layout = Layout.of_lengths([3, 0, 3])
    tokens = PolicyTokens.of(
        logprobs=logprobs, old=old, rollout=old - 0.1, advantages=advantages, keep=keep, layout=layout, config=config
    )
    losses, _ = loss(tokens, config)
    if not bool(losses[keep].isfinite().all()):
        raise UserError(f"{field} is not finite on a trial batch: {losses.detach().tolist()}")
    gradient = torch.autograd.grad(losses[keep].sum(), logprobs, allow_unused=True)[0] if losses.requires_grad else None
    if gradient is None or not bool(gradient.any()):
        raise UserError(f"{field} has no gradient: it must depend on tokens.logprobs, not on tokens.logprobs.detach()")
    if not bool(gradient.isfinite().all()):
        raise UserError(f"{field} has a gradient that is not finite on a trial batch: {gradient.tolist()}")
