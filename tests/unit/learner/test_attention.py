"""Packed sequences attend to themselves alone, exactly; which attention and kernels the learner takes, and why."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, GptOssConfig, Qwen3Config, modeling_flash_attention_utils
from transformers.integrations import flash_attention
from transformers.modeling_flash_attention_utils import _process_flash_attention_kwargs
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as gpt_oss_attention

from common.config import LearnerConfig
from common.errors import UserError
from learner.policy import kernels
from learner.policy.attention import PACKED_VARLEN, pack_sequences, packed_sdpa, packed_varlen
from learner.policy.kernels import apply_kernels, choose_attention
from learner.policy.model import Policy
from tests.support.attention import tensors_of, varlen_reference
from tests.support.learner import VOCABULARY, save_tiny_model

LENGTHS = [7, 31, 12, 1, 30, 16]


PACKED = {"sdpa": packed_sdpa, "varlen": partial(packed_varlen, varlen_reference)}


def attend(kernel: Callable[..., Any], tensors: list[torch.Tensor], **options: Any) -> torch.Tensor:
    return kernel(torch.nn.Module(), *tensors, None, sequences=pack_sequences(LENGTHS), **options)[0]


@pytest.mark.parametrize("options", [{}, {"sliding_window": 1}, {"sliding_window": 5, "scaling": 0.3}], ids=str)
def test_each_sequence_gets_what_it_gets_alone(options):
    outputs, gradients = [], []
    for kernel in PACKED.values():
        tensors = [tensor.requires_grad_() for tensor in tensors_of(LENGTHS)]
        outputs.append(attend(kernel, tensors, **options))
        (outputs[-1] * torch.arange(outputs[-1].numel()).view_as(outputs[-1]).cos()).sum().backward()
        gradients.append([tensor.grad for tensor in tensors])
    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(*gradients)


def test_flash_attention_learns_where_sequences_begin(monkeypatch):
    """Its own function chain, with a reference in place of the package's kernel."""

    def flash_varlen(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options):
        assert options["causal"]
        bounds, scale = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), options["softmax_scale"]
        return varlen_reference(q, k, v, *bounds, scale=scale, window_size=(-1, 0), enable_gqa=True)

    supported = defaultdict(bool, max_seqlen_q=True, max_seqlen_k=True)  # of what is optional
    process = partial(_process_flash_attention_kwargs, supports_mapping=supported)
    module = SimpleNamespace(is_causal=True, config=SimpleNamespace(_attn_implementation="flash_attention_2"))
    functions = ((None, flash_varlen, None, None, None), (process, None))
    monkeypatch.setattr(modeling_flash_attention_utils, "lazy_import_flash_attention", lambda *_: functions)
    tensors = tensors_of(LENGTHS)
    output, _ = flash_attention.flash_attention_forward(
        module, *tensors, None, scaling=8**-0.5, **pack_sequences(LENGTHS).flash_arguments()
    )
    torch.testing.assert_close(output, attend(PACKED["varlen"], tensors))


@pytest.mark.integration
def test_torchs_kernel_trains_a_policy_without_a_host_sync(tmp_path: Path) -> None:
    """Shapes alone, on fake tensors, which refuse whatever would have the host wait for the device."""
    config, lengths = AutoConfig.from_pretrained(save_tiny_model(tmp_path)), [9, 4]
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


def test_nan_of_neighbours_reaches_neither_values_nor_gradients():
    clean = attend(packed_sdpa, tensors_of(LENGTHS))[:, 7:38]
    tensors = tensors_of(LENGTHS)
    for tensor in tensors:
        tensor[:, :, :7] = torch.nan
        tensor.requires_grad_()
    output = attend(packed_sdpa, tensors)[:, 7:38]
    assert torch.equal(output, clean)
    output.square().sum().backward()
    for tensor in tensors:
        assert not tensor.grad[:, :, 38:].any()
        assert tensor.grad[:, :, 7:38].any()


def test_no_row_is_padded_to_more_than_twice_its_length():
    rows = pack_sequences([100, 60, 50, 49, 20, 3, 2]).padded
    assert [group.shape for group in rows] == [(3, 100), (1, 49), (1, 20), (2, 3)]


@pytest.mark.parametrize("window", [None, 5])
def test_sinks_take_their_share_of_every_softmax(window):
    """As gpt-oss computes a sequence alone: one more column of scores, which is left out after the softmax."""
    sinks = torch.tensor([2.0, -1.0, 0.5, 9.0], dtype=torch.float64)
    ways = []
    for is_packed in (True, False):
        q, k, v, s = (tensor.clone().requires_grad_() for tensor in (*tensors_of(LENGTHS), sinks))
        if is_packed:
            output = attend(packed_sdpa, [q, k, v], s_aux=s, sliding_window=window, scaling=0.3)
        else:
            module, outputs = SimpleNamespace(num_key_value_groups=2, sinks=s, training=False), []
            for part in zip(*(tensor.split(LENGTHS, dim=2) for tensor in (q, k, v)), strict=True):
                back = torch.arange(part[0].shape[2])[:, None] - torch.arange(part[0].shape[2])
                mask = torch.where((back >= 0) & (back < (window or 99)), 0.0, -torch.inf)
                outputs.append(gpt_oss_attention(module, *part, mask, scaling=0.3)[0])
            output = torch.cat(outputs, dim=1)
        (output * torch.arange(output.numel()).view_as(output).cos()).sum().backward()
        ways.append([output, q.grad, k.grad, v.grad, s.grad])
    torch.testing.assert_close(*ways)


@pytest.mark.parametrize(("name", "part"), [("sdpa", "softcap"), ("varlen", "softcap"), ("varlen", "s_aux")])
def test_parts_of_attention_that_are_missing_are_refused(name: str, part: str):
    other = "sdpa" if part == "s_aux" else "flash_attention_2"
    with pytest.raises(UserError, match=f"uses {part}, .*; set learner.attention={other}$"):
        attend(PACKED[name], tensors_of(LENGTHS), **{part: torch.ones(4)})


BOTH = ("liger_kernel", "triton")
FLASH = ("flash_attn",)


def model_with(head_dim: int = 64) -> Qwen3Config:
    return Qwen3Config(hidden_size=256, num_attention_heads=4, head_dim=head_dim)


def pretend(
    monkeypatch: pytest.MonkeyPatch,
    *,
    gpu: bool = True,
    capability: tuple[int, int] = (9, 0),
    varlen: bool = True,
    packages: tuple[str, ...] = (),
) -> None:
    """Pretend that a GPU, torch's variable-length attention and packages are there or not."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(kernels.attention, "varlen_attn", print if varlen else None)

    def find(name: str, *rest: Any) -> Any:
        return (object() if name in packages else None) if name in (*BOTH, *FLASH) else find_spec(name, *rest)

    monkeypatch.setattr(kernels.importlib.util, "find_spec", find)


@pytest.mark.parametrize(
    ("machine", "dtype", "head_dim", "chosen", "because"),
    [
        ({}, "bfloat16", 64, "varlen", "first choice"),
        ({"packages": FLASH}, "bfloat16", 64, "varlen", "first choice"),
        ({"varlen": False, "packages": FLASH}, "bfloat16", 64, "flash_attention_2", "torch.nn.attention.varlen"),
        ({"varlen": False}, "bfloat16", 64, "sdpa", "flash-attn is not installed"),
        ({"gpu": False, "packages": FLASH}, "bfloat16", 64, "sdpa", "no GPU"),
        ({"capability": (7, 5), "packages": FLASH}, "bfloat16", 64, "sdpa", "capability 7.5"),
        ({"packages": FLASH}, "float32", 64, "sdpa", "learner.dtype is float32"),
        ({"packages": FLASH}, "bfloat16", 100, "sdpa", "100"),
        ({"packages": FLASH}, "bfloat16", 288, "sdpa", "288"),
    ],
)
def test_auto_takes_the_first_that_can_be_used_and_says_why(
    monkeypatch: pytest.MonkeyPatch, machine: dict[str, Any], dtype: Any, head_dim: int, chosen: str, because: str
) -> None:
    pretend(monkeypatch, **machine)
    choice = choose_attention(LearnerConfig(dtype=dtype), model_with(head_dim))
    assert choice.name == chosen
    assert because in choice.reason


def test_a_model_with_sinks_is_computed_where_sinks_are(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, packages=FLASH)
    choice = choose_attention(LearnerConfig(dtype="bfloat16"), GptOssConfig())
    assert (choice.name, choice.reason) == ("sdpa", "varlen, flash_attention_2: the model's attention has sinks")


@pytest.mark.parametrize(
    ("asked", "machine", "settings", "why"),
    [
        ("varlen", {"gpu": False}, {}, "no GPU"),
        ("varlen", {"varlen": False}, {}, "torch.nn.attention.varlen"),
        ("varlen", {}, {"dtype": "float32"}, "float32"),
        ("flash_attention_2", {}, {}, "not installed"),
        ("flash_attention_2", {"packages": FLASH}, {"sequence_parallel": 2}, "for varlen and sdpa only"),
        ("varlen", {}, {}, None),
        ("varlen", {}, {"sequence_parallel": 2}, None),
        ("flash_attention_2", {"packages": FLASH}, {}, None),
        ("sdpa", {}, {}, None),
    ],
)
def test_an_attention_that_is_named_is_taken_or_refused(
    monkeypatch: pytest.MonkeyPatch, asked: Any, machine: dict[str, Any], settings: dict[str, Any], why: str | None
) -> None:
    pretend(monkeypatch, **machine)
    config = LearnerConfig(attention=asked, **settings)
    if why is None:
        assert choose_attention(config, model_with()).name == asked
        return
    with pytest.raises(UserError, match=f"learner.attention = '{asked}' cannot be used: .*{why}"):
        choose_attention(config, model_with())


@pytest.mark.parametrize(
    ("machine", "known", "why"),
    [
        ({"packages": ("triton",)}, "qwen3", "needs the package liger_kernel"),
        ({"packages": ("liger_kernel",)}, "qwen3", "needs the package triton"),
        ({"packages": BOTH, "gpu": False}, "qwen3", "needs a GPU"),
        ({"packages": BOTH}, "llama", "none for models of type qwen3"),
        ({"packages": BOTH}, "qwen3", None),
    ],
)
def test_liger_leaves_the_output_layer_alone_or_is_refused(
    monkeypatch: pytest.MonkeyPatch, machine: dict[str, Any], known: str, why: str | None
) -> None:
    pretend(monkeypatch, **machine)
    calls: list[Any] = []
    module: Any = ModuleType("liger_kernel.transformers.monkey_patch")
    module.MODEL_TYPE_TO_APPLY_LIGER_FN = {known: print}
    module._apply_liger_kernel_to_instance = lambda model, **options: calls.append((model, options))
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    model: Any = SimpleNamespace(config=model_with())
    if why is None:
        apply_kernels(model, "liger")
        assert calls == [(model, {"cross_entropy": False, "fused_linear_cross_entropy": False})]
        return
    with pytest.raises(UserError, match=f"learner.kernels = 'liger'.*{why}"):
        apply_kernels(model, "liger")
