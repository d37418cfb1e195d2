"""Which attention and which kernels the learner takes on which machine, and what it says of it."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen3Config

from common.config import LearnerConfig
from common.errors import UserError
from learner import kernels
from learner.kernels import apply_kernels, choose_attention

MODEL = Qwen3Config(hidden_size=256, num_attention_heads=4, head_dim=64)


def pretend(
    monkeypatch: pytest.MonkeyPatch,
    *,
    gpu: bool = True,
    capability: tuple[int, int] = (9, 0),
    varlen: bool = True,
    packages: tuple[str, ...] = (),
) -> None:
    """A GPU, torch's variable-length attention and packages are there or not."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(kernels.attention, "varlen_attn", print if varlen else None)
    optional = ("flash_attn", "liger_kernel", "triton")
    monkeypatch.setattr(
        kernels.importlib.util,
        "find_spec",
        lambda name, *rest: (object() if name in packages else None) if name in optional else find_spec(name, *rest),
    )


@pytest.mark.parametrize(
    ("machine", "dtype", "chosen", "because"),
    [
        ({}, "bfloat16", "varlen", "first choice"),
        ({"packages": ("flash_attn",)}, "bfloat16", "varlen", "first choice"),
        ({"varlen": False, "packages": ("flash_attn",)}, "bfloat16", "flash_attention_2", "torch.nn.attention.varlen"),
        ({"varlen": False}, "bfloat16", "sdpa", "flash-attn is not installed"),
        ({"gpu": False, "packages": ("flash_attn",)}, "bfloat16", "sdpa", "no GPU"),
        ({"capability": (7, 5), "packages": ("flash_attn",)}, "bfloat16", "sdpa", "capability 7.5"),
        ({"packages": ("flash_attn",)}, "float32", "sdpa", "learner.dtype is float32"),
    ],
)
def test_auto_takes_the_first_that_can_be_used_and_says_why(
    monkeypatch: pytest.MonkeyPatch, machine: dict[str, Any], dtype: Any, chosen: str, because: str
) -> None:
    pretend(monkeypatch, **machine)
    choice = choose_attention(LearnerConfig(dtype=dtype), MODEL)
    assert choice.name == chosen
    assert because in choice.reason


@pytest.mark.parametrize("width", [100, 288])
def test_heads_of_a_width_that_the_kernels_lack_leave_sdpa(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    pretend(monkeypatch, packages=("flash_attn",))
    model = Qwen3Config(hidden_size=256, num_attention_heads=4, head_dim=width)
    choice = choose_attention(LearnerConfig(), model)
    assert choice.name == "sdpa"
    assert str(width) in choice.reason


@pytest.mark.parametrize(
    ("asked", "machine", "dtype", "why"),
    [
        ("varlen", {"gpu": False}, "bfloat16", "no GPU"),
        ("varlen", {"varlen": False}, "bfloat16", "torch.nn.attention.varlen"),
        ("varlen", {}, "float32", "float32"),
        ("flash_attention_2", {"gpu": False, "packages": ("flash_attn",)}, "bfloat16", "no GPU"),
        ("flash_attention_2", {}, "bfloat16", "not installed"),
        ("flash_attention_2", {"packages": ("flash_attn",)}, "float32", "float32"),
    ],
)
def test_an_attention_that_is_named_and_cannot_be_is_refused(
    monkeypatch: pytest.MonkeyPatch, asked: Any, machine: dict[str, Any], dtype: Any, why: str
) -> None:
    pretend(monkeypatch, **machine)
    with pytest.raises(UserError, match=f"learner.attention = '{asked}' cannot be used: .*{why}"):
        choose_attention(LearnerConfig(attention=asked, dtype=dtype), MODEL)


@pytest.mark.parametrize("asked", ["varlen", "flash_attention_2", "sdpa"])
def test_an_attention_that_is_named_and_can_be_is_taken(monkeypatch: pytest.MonkeyPatch, asked: Any) -> None:
    pretend(monkeypatch, packages=("flash_attn",))
    assert choose_attention(LearnerConfig(attention=asked), MODEL).name == asked


@pytest.mark.parametrize(
    ("machine", "why"),
    [
        ({"packages": ("triton",)}, "needs the package liger_kernel"),
        ({"packages": ("liger_kernel",)}, "needs the package triton"),
        ({"packages": ("liger_kernel", "triton"), "gpu": False}, "needs a GPU"),
        ({"packages": ("liger_kernel", "triton")}, "none for models of type qwen3"),
    ],
)
def test_liger_that_cannot_be_used_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, machine: dict[str, Any], why: str
) -> None:
    pretend(monkeypatch, **machine)
    liger(monkeypatch, {"llama": print})
    with pytest.raises(UserError, match=f"learner.kernels = 'liger'.*{why}"):
        apply_kernels(SimpleNamespace(config=MODEL), "liger")  # type: ignore[arg-type]


def test_liger_leaves_the_output_layer_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, packages=("liger_kernel", "triton"))
    calls = liger(monkeypatch, {"qwen3": print})
    model = SimpleNamespace(config=MODEL)
    apply_kernels(model, "liger")  # type: ignore[arg-type]
    assert calls == [(model, {"cross_entropy": False, "fused_linear_cross_entropy": False})]


def liger(monkeypatch: pytest.MonkeyPatch, known: dict[str, Any]) -> list[Any]:
    """Liger's module with models that it knows; returns what it was called with."""
    calls: list[Any] = []
    module = ModuleType("liger_kernel.transformers.monkey_patch")
    module.MODEL_TYPE_TO_APPLY_LIGER_FN = known  # type: ignore[attr-defined]
    module._apply_liger_kernel_to_instance = lambda model, **options: calls.append((model, options))  # type: ignore[attr-defined]
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return calls
