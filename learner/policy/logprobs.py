"""Log-probabilities of given tokens without a float32 [T, V] ever in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class LogprobHead(nn.Linear):
    """An output layer that can answer with log-probs of target tokens instead of logits.

    The computation lives in the layer's own forward, so that ZeRO 3 gathers its weight around it.
    """

    chunk: int
    temperature: float
    in_float32: bool

    @classmethod
    def adopt(cls, head: nn.Linear, chunk: int, temperature: float, in_float32: bool = True) -> None:
        """Turn a model's output layer into this class in place; parameters and their ties stay as they are.

        Args:
            in_float32: do not round logits to the weights' type; the generators must do the same (`head_dtype`).
        """
        head.__class__ = cls
        head.chunk, head.temperature, head.in_float32 = chunk, temperature, in_float32  # type: ignore[assignment]

    def forward(  # type: ignore[override]
        self,
        hidden: torch.Tensor,
        targets: torch.Tensor | None = None,
        entropy: bool = False,
        temperature: float | None = None,
        others: torch.Tensor | None = None,
    ) -> Any:
        """Logits of `hidden`, or with `targets` [N] for `hidden` [N, H]: (log-probs [N], entropy [N]), float32.

        Both are of softmax(logits / temperature), by default that of `adopt`. Without `entropy` the second is zeros.

        Args:
            others: K more ids for each place, int64 [N, K]; their log-probs [N, K] become a third result.
        """
        if targets is None:
            return super().forward(hidden)
        temperature = self.temperature if temperature is None else temperature
        precise = self.in_float32 and hidden.dtype.itemsize < 4
        parts = self.parts(len(targets))
        results = _TargetLogprobs.apply(
            hidden, self.weight, self.bias, targets, others, parts, temperature, entropy, precise
        )
        return results[:2] if others is None else results

    def parts(self, count: int) -> list[slice]:
        """The chunks of `count` targets."""
        return [slice(start, start + self.chunk) for start in range(0, count, self.chunk)]


class _TargetLogprobs(torch.autograd.Function):
    """Computes logits chunk by chunk, and once more in the backward pass instead of keeping them."""

    @staticmethod
    def forward(ctx: Any, hidden, weight, bias, targets, others, parts, temperature, entropy, precise):  # type: ignore[no-untyped-def]
        logits_of = _projection(weight, bias, precise)
        logprobs = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        entropies = torch.zeros_like(logprobs)
        of_others = None if others is None else torch.empty_like(others, dtype=torch.float32)
        for part in parts:
            log_p = _log_softmax(logits_of(hidden[part]), temperature)
            logprobs[part] = log_p.gather(1, targets[part, None]).squeeze(1)
            if of_others is not None:
                of_others[part] = log_p.gather(1, others[part])
            if entropy:
                entropies[part] = -log_p.exp().mul_(log_p).sum(1)
        ctx.save_for_backward(hidden, weight, bias, targets, others, entropies)
        ctx.parts, ctx.temperature, ctx.entropy, ctx.precise = parts, temperature, entropy, precise
        ctx.set_materialize_grads(False)  # entropies that are only reported have no gradient
        return logprobs, entropies, of_others

    @staticmethod
    def backward(ctx: Any, grad_logprobs, grad_entropies, grad_others):  # type: ignore[no-untyped-def]
        """d log p_t / dz = 1_t - p, of targets and others; dH / dz = -p (log p + H); all over the temperature."""
        hidden, weight, bias, targets, others, entropies = ctx.saved_tensors
        logits_of = _projection(weight, bias, ctx.precise)
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(entropies)
        grad_sums = grad_logprobs if grad_others is None else grad_logprobs + grad_others.sum(1)
        with_entropy = ctx.entropy and grad_entropies is not None
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if weight.requires_grad else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None else None
        for part in ctx.parts:
            log_p = _log_softmax(logits_of(hidden[part]), ctx.temperature)
            # With a large vocabulary, time goes into moving [C, V] tensors through memory, so avoid copies.
            p = log_p.exp() if with_entropy else log_p.exp_()
            grad_logits = p * -grad_sums[part, None] if with_entropy else p.mul_(-grad_sums[part, None])
            grad_logits.scatter_add_(1, targets[part, None], grad_logprobs[part, None])
            if grad_others is not None:
                grad_logits.scatter_add_(1, others[part], grad_others[part])
            if with_entropy:
                grad_logits -= grad_entropies[part, None] * p * (log_p + entropies[part, None])
            grad_logits = grad_logits.div_(ctx.temperature).to(hidden.dtype)
            grad_hidden[part] = grad_logits @ weight
            if grad_weight is not None:
                grad_weight += grad_logits.T @ hidden[part]
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
            None,
            None,
            None,
        )


def _projection(
    weight: torch.Tensor, bias: torch.Tensor | None, precise: bool
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Logits [C, V] of hidden states [C, H]; with `precise` in float32 although the operands have fewer bits."""
    if not precise:
        return lambda hidden: F.linear(hidden, weight, bias)
    offset = None if bias is None else bias.float()
    if weight.is_cuda:
        # Accumulated and written in float32 without a float32 copy of the weight, as vLLM does.
        def logits(hidden: torch.Tensor) -> torch.Tensor:
            product = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
            return product if offset is None else product + offset

        return logits
    wide = weight.float()
    return lambda hidden: F.linear(hidden.float(), wide, offset)


def _log_softmax(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """log softmax of one chunk's logits over the temperature, float32 [C, V]; the logits are overwritten."""
    logits = logits.float()
    return torch.log_softmax(logits if temperature == 1 else logits.div_(temperature), dim=-1)
