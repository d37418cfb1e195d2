"""Packed sequences attend to themselves alone, exactly."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.varlen import varlen_attn
from transformers import AutoConfig, AutoModelForCausalLM, modeling_flash_attention_utils
from transformers.integrations import flash_attention
from transformers.modeling_flash_attention_utils import _process_flash_attention_kwargs

from common.errors import UserError
from learner.attention import PACKED_VARLEN, pack_sequences, packed_sdpa, packed_varlen
from learner.model import Policy
from tests.support.learner import VOCABULARY, save_tiny_model

LENGTHS = [7, 31, 12, 1, 30, 16]


def packed(lengths: list[int], heads: int = 4, kv_heads: int = 2, width: int = 8) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, h, sum(lengths), width, dtype=torch.float64) for h in (heads, kv_heads, kv_heads)]


def alone(tensors: list[torch.Tensor], lengths: list[int], window: int | None = None) -> torch.Tensor:
    """The same attention sequence by sequence, with an explicit mask."""
    outputs = []
    for parts in zip(*(tensor.split(lengths, dim=2) for tensor in tensors), strict=True):
        query, key, value = parts
        length = query.shape[2]
        mask = torch.ones(length, length).tril().bool()
        if window:
            mask &= ~torch.ones(length, length).tril(-window).bool()
        key, value = (part.repeat_interleave(2, dim=1) for part in (key, value))
        outputs.append(F.scaled_dot_product_attention(query, key, value, attn_mask=mask))
    return torch.cat(outputs, dim=2).transpose(1, 2)


def varlen_reference(*args: Any, **kwargs: Any) -> torch.Tensor:
    """What torch's documentation says of `varlen_attn`, one sequence after the other; on any device."""
    call = inspect.signature(varlen_attn).bind(*args, **kwargs)
    call.apply_defaults()
    a = SimpleNamespace(**call.arguments)
    assert a.cu_seq_q.dtype == a.cu_seq_k.dtype == torch.int32
    assert (a.max_q, a.max_k) == (a.cu_seq_q.diff().max(), a.cu_seq_k.diff().max())
    assert a.query.stride(-1) == a.key.stride(-1) == a.value.stride(-1) == 1
    assert a.enable_gqa or a.query.shape[1] == a.key.shape[1]
    before, after = a.window_size
    outputs = []
    for start, end in zip(a.cu_seq_q[:-1].tolist(), a.cu_seq_q[1:].tolist(), strict=True):
        q, k, v = (tensor[start:end].transpose(0, 1) for tensor in (a.query, a.key, a.value))
        back = torch.arange(end - start)[:, None] - torch.arange(end - start)
        mask = (back <= before if before >= 0 else True) & ((-back <= after) if after >= 0 else back == back)
        output = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=a.scale, enable_gqa=a.enable_gqa)
        outputs.append(output.transpose(0, 1))
    return torch.cat(outputs)


PACKED = {"sdpa": packed_sdpa, "varlen": partial(packed_varlen, varlen_reference)}


@pytest.mark.parametrize("kernel", PACKED.values(), ids=PACKED)
@pytest.mark.parametrize("window", [None, 1, 5])
def test_each_sequence_gets_what_it_gets_alone(window, kernel):
    tensors = packed(LENGTHS)
    output, _ = kernel(torch.nn.Module(), *tensors, None, sequences=pack_sequences(LENGTHS), sliding_window=window)
    torch.testing.assert_close(output, alone(tensors, LENGTHS, window))


def test_both_give_the_same_gradients():
    gradients = []
    for kernel in PACKED.values():
        tensors = [tensor.requires_grad_() for tensor in packed(LENGTHS)]
        output, _ = kernel(torch.nn.Module(), *tensors, None, sequences=pack_sequences(LENGTHS), scaling=0.3)
        (output * torch.arange(output.numel()).view_as(output).cos()).sum().backward()
        gradients.append([tensor.grad for tensor in tensors])
    for first, second in zip(*gradients, strict=True):
        torch.testing.assert_close(first, second)


def test_flash_attention_of_transformers_is_told_where_sequences_begin(monkeypatch):
    """Its own function chain, with a reference in place of the package's kernel."""

    def flash_varlen(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options):
        assert options["causal"]
        bounds = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        scale = options["softmax_scale"]
        return varlen_reference(q, k, v, *bounds, scale=scale, window_size=(-1, 0), enable_gqa=True)

    supported = defaultdict(bool, max_seqlen_q=True, max_seqlen_k=True)  # of what is optional
    process = partial(_process_flash_attention_kwargs, supports_mapping=supported)
    module = SimpleNamespace(is_causal=True, config=SimpleNamespace(_attn_implementation="flash_attention_2"))
    functions = ((None, flash_varlen, None, None, None), (process, None))
    monkeypatch.setattr(modeling_flash_attention_utils, "lazy_import_flash_attention", lambda *_: functions)
    tensors = packed(LENGTHS)
    output, _ = flash_attention.flash_attention_forward(
        module, *tensors, None, scaling=8**-0.5, **pack_sequences(LENGTHS).flash_arguments()
    )
    torch.testing.assert_close(output, alone(tensors, LENGTHS))


def test_a_policy_trains_by_torchs_own_kernel_without_asking_for_a_number(tmp_path: Path) -> None:
    """Shapes alone, on fake tensors, which refuse whatever would have the host wait for the device."""
    config = AutoConfig.from_pretrained(save_tiny_model(tmp_path))
    lengths = [9, 4]
    sequences = pack_sequences(lengths)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=PACKED_VARLEN)
        policy = Policy(model.train(), chunk=3, temperature=0.7)
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        predict = torch.tensor([2, 3, 4, 5, 10])
        logprobs, entropies = policy(torch.zeros_like(positions), positions, sequences, predict, predict, entropy=True)
        (logprobs.sum() + entropies.sum()).backward()
        assert logprobs.shape == entropies.shape == (5,)
        assert model.get_input_embeddings().weight.grad.shape == (VOCABULARY, config.hidden_size)
        assert all(parameter.grad.shape == parameter.shape for parameter in policy.parameters())


def test_neither_values_nor_gradients_depend_on_neighbours():
    tensors = packed(LENGTHS)
    changed = [tensor.clone() for tensor in tensors]
    for tensor in changed:
        tensor[:, :, :7] = torch.nan
        tensor[:, :, 38:] *= 3
    first, second = (
        packed_sdpa(torch.nn.Module(), *given, None, sequences=pack_sequences(LENGTHS))[0]
        for given in (tensors, changed)
    )
    assert torch.equal(first[:, 7:38], second[:, 7:38])
    tensors = [tensor.requires_grad_() for tensor in tensors]
    found, _ = packed_sdpa(torch.nn.Module(), *tensors, None, sequences=pack_sequences(LENGTHS))
    found[:, 7:38].square().sum().backward()
    for tensor in tensors:
        assert torch.all(tensor.grad[:, :, :7] == 0)
        assert torch.all(tensor.grad[:, :, 38:] == 0)
        assert torch.any(tensor.grad[:, :, 7:38] != 0)


def test_no_row_is_padded_to_more_than_twice_its_length():
    lengths = [100, 60, 50, 49, 20, 3, 2]
    rows = pack_sequences(lengths).padded
    assert [group.shape for group in rows] == [(3, 100), (1, 49), (1, 20), (2, 3)]


@pytest.mark.parametrize("kernel", PACKED.values(), ids=PACKED)
def test_parts_of_attention_that_are_missing_are_refused(kernel: Callable[..., Any]):
    with pytest.raises(UserError, match="softcap"):
        kernel(torch.nn.Module(), *packed([4]), None, sequences=pack_sequences([4]), softcap=30.0)
