"""Chunked log-probs equal whole ones, forward and backward, without the memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig

from learner import memory_model
from learner.policy.logprobs import LogprobHead

N, H, V = 50, 16, 33


def head_of(chunk: int, temperature: float, bias: bool, dtype: torch.dtype = torch.float32) -> LogprobHead:
    torch.manual_seed(0)
    head = nn.Linear(H, V, bias=bias, dtype=dtype)
    LogprobHead.adopt(head, chunk, temperature)
    return head


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(N, H, dtype=dtype, requires_grad=True), torch.randint(V, (N,))


def whole(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, others: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    log_p = torch.log_softmax(logits / temperature, dim=-1)
    values = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    return values if others is None else (*values, log_p.gather(1, others))


@pytest.mark.parametrize(("chunk", "temperature"), [(7, 0.7), (1000, 1.0)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("k", [0, 5])
def test_values_and_gradients_equal_those_of_a_whole_log_softmax(chunk, temperature, bias, k):
    """Of the targets, of k other ids at each place, and of the entropy."""
    torch.manual_seed(2)
    towards_logprobs, towards_entropy, towards_others = torch.randn(N), torch.randn(N), torch.randn(N, k)
    others = torch.rand(N, V).argsort(1)[:, :k] if k else None
    head, results = head_of(chunk, temperature, bias), []
    for is_chunked in (True, False):
        hidden, targets = inputs()
        head.zero_grad()
        # Without targets it is an ordinary output layer.
        if is_chunked:
            values = head(hidden, targets, entropy=True, others=others)
        else:
            values = whole(head(hidden), targets, temperature, others)
        logprobs, entropy, *more = values
        total = logprobs @ towards_logprobs + entropy @ towards_entropy
        sum(((one * towards_others).sum() for one in more), total).backward()
        results.append([*values, hidden.grad, *(parameter.grad.clone() for parameter in head.parameters())])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 if k else 1e-6)


class LargestTensor(TorchDispatchMode):
    """Remembers the largest float32 tensor that any operation makes."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32:
                self.numel = max(self.numel, tensor.numel())
        return result


def test_no_tensor_of_all_tokens_and_all_words_is_ever_made():
    tokens, words, chunk = 512, 512, 64
    head = nn.Linear(4, words, bias=False)
    LogprobHead.adopt(head, chunk, 1.0)
    hidden = torch.randn(tokens, 4, requires_grad=True)
    targets, others = torch.randint(words, (tokens,)), torch.randint(words, (tokens, 8))
    with LargestTensor() as largest:
        logprobs, _, of_others = head(hidden, targets, entropy=True, others=others)
        (logprobs.sum() + of_others.sum()).backward()
    assert largest.numel <= chunk * words


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_asks_the_device_for_a_number(dtype, entropy):
    """Fake tensors have none: `item`, `bool`, `tolist` and `nonzero` raise on them, where a GPU would be waited for."""
    with FakeTensorMode():
        head = head_of(7, 0.7, True, dtype)
        hidden = torch.empty(N, H, dtype=dtype, requires_grad=True)
        targets, others = torch.empty(N, dtype=torch.int64), torch.empty(N, 3, dtype=torch.int64)
        logprobs, entropies, of_others = head(hidden, targets, entropy=entropy, others=others)
        (logprobs.sum() + entropies.sum() + of_others.sum()).backward()
        assert hidden.grad.shape == hidden.shape


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("in_float32", "tolerance"), [(True, 1e-5), (False, 0.05)])
def test_bfloat16_weights_give_nearly_exact_float32_logprobs(bias, in_float32, tolerance):
    head = head_of(8, 0.5, bias, torch.bfloat16)
    head.in_float32 = in_float32
    hidden, targets = inputs(torch.bfloat16)
    logprobs, entropy = head(hidden, targets, entropy=True)
    (logprobs.sum() + entropy.sum()).backward()
    exact = whole(hidden.float() @ head.weight.float().T + (head.bias.float() if bias else 0), targets, 0.5)
    assert head.weight.grad.dtype == torch.bfloat16
    torch.testing.assert_close((logprobs, entropy), exact, rtol=0, atol=tolerance)
    # Rounded logits are far from what float32 ones are near to.
    assert in_float32 or (logprobs - exact[0]).abs().max() > 1e-3


def test_the_memory_model_finds_the_peak_of_all_chunks_in_a_few(model, monkeypatch):
    config, micro = AutoConfig.from_pretrained(model), memory_model.Micro((60, 40), prompt=1, chunk=8)
    few = memory_model.peak_activations(config, micro)
    monkeypatch.setattr(memory_model, "FEW_CHUNKS", 100)
    assert few == memory_model.peak_activations(config, micro) > 0
