"""Log-probabilities of given tokens without a float32 [T, V] ever in memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

CHUNK = 1024  # the fewest tokens whose logits exist at the same time
# A chunk's float32 logits take 1 / LOGITS_SHARE of a GPU's memory; there are three such tensors.
LOGITS_SHARE = 64


def chunk_of(vocabulary: int, gpu_bytes: int) -> int:
    """Tokens whose logits exist at the same time, by the memory of the GPU; 0 bytes: there is none.

    Each chunk costs a pass over the gradient of the output layer's weight, so fewer of them are faster.
    """
    return max(1, gpu_bytes // LOGITS_SHARE // (4 * vocabulary * CHUNK)) * CHUNK


class LogitTransform(NamedTuple):
    """What a model does with its logits z: softcap * tanh(z / softcap), then times `scale`, as vLLM computes it."""

    softcap: float | None = None
    scale: float = 1.0

    @classmethod
    def of(cls, config: Any) -> LogitTransform:
        """Read from a text model's configuration; families of models have different settings for it."""
        value = partial(getattr, config)
        scale = (value("logit_scale", None) or 1.0) * (value("lm_head_multiplier", None) or 1.0)
        return cls(value("final_logit_softcapping", None), scale / (value("logits_scaling", None) or 1.0))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """The transformed logits; those given are overwritten."""
        if self.softcap is not None:
            logits = logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits if self.scale == 1 else logits.mul_(self.scale)

    def slope(self, transformed: torch.Tensor) -> torch.Tensor | float:
        """The derivative of `apply` where its result is `transformed`: (1 - tanh²) scale."""
        if self.softcap is None:
            return self.scale
        return transformed.div(self.softcap * self.scale).square_().neg_().add_(1).mul_(self.scale)


class LogprobHead(nn.Linear):
    """An output layer that can answer with log-probs of target tokens instead of logits.

    The computation lives in the layer's own forward, so that ZeRO 3 gathers its weight around it.
    """

    chunk: int
    temperature: float
    in_float32: bool
    transform: LogitTransform

    @classmethod
    def adopt(
        cls,
        head: nn.Linear,
        chunk: int,
        temperature: float,
        in_float32: bool = True,
        transform: LogitTransform | None = None,
    ) -> None:
        """Turn a model's output layer into this class in place; parameters and their ties stay as they are.

        Args:
            in_float32: do not round logits to the weights' type; the generators must do the same (`head_dtype`).
            transform: what the model does with the logits.
        """
        head.__class__ = cls
        head.chunk, head.temperature, head.in_float32 = chunk, temperature, in_float32  # type: ignore[assignment]
        head.transform = transform or LogitTransform()  # type: ignore[assignment]

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
        precise = self.in_float32 and hidden.dtype.itemsize < 4
        if targets is None:
            logits = _projection(self.weight, self.bias, precise)(hidden.flatten(0, -2))
            return logits.unflatten(0, hidden.shape[:-1])
        temperature = self.temperature if temperature is None else temperature
        parts = self.parts(len(targets))
        results = _TargetLogprobs.apply(
            hidden, self.weight, self.bias, targets, others, parts, self.transform, temperature, entropy, precise
        )
        return results[:2] if others is None else results

    def parts(self, count: int) -> list[slice]:
        """The chunks of `count` targets."""
        return [slice(start, start + self.chunk) for start in range(0, count, self.chunk)]


class _TargetLogprobs(torch.autograd.Function):
    """Computes logits chunk by chunk, and once more in the backward pass instead of keeping them."""

    @staticmethod
    def forward(ctx: Any, hidden, weight, bias, targets, others, parts, transform, temperature, entropy, precise):  # type: ignore[no-untyped-def]
        logits_of = _projection(weight, bias, precise)
        logprobs = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        entropies = torch.zeros_like(logprobs)
        of_others = None if others is None else torch.empty_like(others, dtype=torch.float32)
        for part in parts:
            log_p = _log_softmax(transform.apply(logits_of(hidden[part]).float()), temperature)
            logprobs[part] = log_p.gather(1, targets[part, None]).squeeze(1)
            if of_others is not None:
                of_others[part] = log_p.gather(1, others[part])
            if entropy:
                entropies[part] = -log_p.exp().mul_(log_p).sum(1)
        ctx.save_for_backward(hidden, weight, bias, targets, others, entropies)
        ctx.settings = parts, transform, temperature, entropy, precise
        ctx.set_materialize_grads(False)  # entropies that are only reported have no gradient
        return logprobs, entropies, of_others

    @staticmethod
    def backward(ctx: Any, grad_logprobs, grad_entropies, grad_others):  # type: ignore[no-untyped-def]
        """d log p_t / dz = 1_t - p, of targets and others; dH / dz = -p (log p + H); all over the temperature."""
        hidden, weight, bias, targets, others, entropies = ctx.saved_tensors
        parts, transform, temperature, entropy, precise = ctx.settings
        logits_of = _projection(weight, bias, precise)
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(entropies)
        grad_sums = grad_logprobs if grad_others is None else grad_logprobs + grad_others.sum(1)
        with_entropy = entropy and grad_entropies is not None
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if weight.requires_grad else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None else None
        for part in parts:
            logits = transform.apply(logits_of(hidden[part]).float())
            slope = transform.slope(logits)  # before the logits are overwritten
            log_p = _log_softmax(logits, temperature)
            # With a large vocabulary, time goes into moving [C, V] tensors through memory, so avoid copies.
            p = log_p.exp() if with_entropy else log_p.exp_()
            grad_logits = p * -grad_sums[part, None] if with_entropy else p.mul_(-grad_sums[part, None])
            grad_logits.scatter_add_(1, targets[part, None], grad_logprobs[part, None])
            if grad_others is not None:
                grad_logits.scatter_add_(1, others[part], grad_others[part])
            if with_entropy:
                grad_logits -= grad_entropies[part, None] * p * (log_p + entropies[part, None])
            for factor in (1 / temperature, slope):
                if not isinstance(factor, float) or factor != 1:
                    grad_logits.mul_(factor)
            grad_logits = grad_logits.to(hidden.dtype)
            grad_hidden[part] = grad_logits @ weight
            if grad_weight is not None:
                grad_weight += grad_logits.T @ hidden[part]
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *[None] * 7,
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
    """log softmax of one chunk's float32 logits over the temperature, float32 [C, V]; the logits are overwritten."""
    return torch.log_softmax(logits if temperature == 1 else logits.div_(temperature), dim=-1)
