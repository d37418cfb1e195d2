"""Chooses the implementations of the policy's attention and layers on this machine."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from common.config import LearnerConfig
from common.errors import UserError, first_line
from learner.policy import attention
from learner.policy.attention import CHUNKED, PACKED_SDPA, PACKED_VARLEN

# In order of preference, as `learner.attention` and as transformers name them.
IMPLEMENTATIONS = {"varlen": PACKED_VARLEN, "flash_attention_2": "flash_attention_2", "sdpa": PACKED_SDPA}
# Lowest compute capability with flash attention, which `varlen` and `flash_attention_2` use.
CAPABILITY = (8, 0)
WIDEST_HEAD = 256  # numbers per head that flash attention takes at most
WITH_SINKS = ("gpt_oss",)  # types of models whose attention only sdpa computes
SOFT_CAPS = "soft caps"


@dataclass(frozen=True, slots=True)
class Choice:
    """An implementation, as `learner.attention` or `learner.kernels` names it, and why it was chosen."""

    name: str
    reason: str


class Flash(NamedTuple):
    """An implementation of torch's flash attention: the module, the GPU and the heads that it needs."""

    name: str
    module: str
    capability: int
    widest_head: int


FLASH = Flash("FA4", "flash_attn.cute.interface", 10, 128), Flash("FA3", "flash_attn_interface", 9, 256)


def choose_attention(config: LearnerConfig, model: PreTrainedConfig) -> Choice:
    """The implementation that `learner.attention` names; with `auto` the first of `IMPLEMENTATIONS` that works here.

    For `varlen`, torch's flash attention is set to the implementation in `FLASH` for this GPU, if it is installed.

    Raises:
        UserError: the implementation cannot be used; the message says why.
    """
    if config.attention == "auto":
        choice = _first_usable(config, model)
    elif hindrance := _hindrance(config.attention, config, model):
        raise UserError(f"learner.attention = {config.attention!r} cannot be used: {hindrance}; use auto or sdpa")
    else:
        choice = Choice(config.attention, "learner.attention names it")
    if choice.name != "varlen":
        return choice
    return replace(choice, reason=f"{choice.reason}; by {_activate_flash(_head_width(model))}")


def _first_usable(config: LearnerConfig, model: PreTrainedConfig) -> Choice:
    names_by_hindrance: dict[str, list[str]] = {}
    for name in IMPLEMENTATIONS:
        hindrance = _hindrance(name, config, model)
        if hindrance is None:
            break
        names_by_hindrance.setdefault(hindrance, []).append(name)
    reasons = [f"{', '.join(names)}: {hindrance}" for hindrance, names in names_by_hindrance.items()]
    return Choice(name, "; ".join(reasons) or "the first choice can be used")


def _activate_flash(head_width: int) -> str:
    """Have torch's flash attention use the implementation in `FLASH` for this GPU; returns which it uses, and why."""
    major, _ = torch.cuda.get_device_capability()
    flash = next((one for one in FLASH if one.capability == major and head_width <= one.widest_head), None)
    if flash is None:
        return "torch's own FA2"
    try:
        torch.nn.attention.activate_flash_attention_impl(flash.name)
    except (ImportError, AttributeError, RuntimeError) as error:
        return f"torch's own FA2, because {flash.name} cannot be used: {first_line(error)}"
    return f"{flash.name} of {flash.module}"


def choose_kernels(asked: str, model: PreTrainedConfig) -> Choice:
    """The kernels of norms, rotary positions and gated layers; raises `UserError` if Liger's are named and unusable."""
    if asked == "torch":
        return Choice("torch", "learner.kernels names it")
    hindrance = _liger_hindrance(model)
    if hindrance is None:
        return Choice("liger", "the first choice can be used" if asked == "auto" else "learner.kernels names it")
    if asked == "liger":
        raise UserError(f"learner.kernels = 'liger' cannot be used: {hindrance}; use auto or torch")
    return Choice("torch", f"liger: {hindrance}")


def _liger_hindrance(model: PreTrainedConfig) -> str | None:
    """Why Liger's kernels cannot be used here; None if they can."""
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    for package in ("liger_kernel", "triton"):
        if importlib.util.find_spec(package) is None:
            return f"the package {package} is not installed (pip install 'spo-trainer[liger]')"
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    if model.model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        return f"Liger has none for models of type {model.model_type}"
    return None


def apply_liger(model: PreTrainedModel) -> None:
    """Replace norms, rotary positions and gated layers of a model, in place, by Liger's kernels.

    The output layer stays: `learner.policy.logprobs` never holds all logits either, and computes what the loss needs.
    """
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model, cross_entropy=False, fused_linear_cross_entropy=False)


def _hindrance(name: str, config: LearnerConfig, model: PreTrainedConfig) -> str | None:
    """Why an implementation of attention cannot be used here; None if it can."""
    if name == "sdpa":
        return None
    part = varlen_lacks(model)
    if part is not None and not (name == "flash_attention_2" and part == SOFT_CAPS):
        return f"the model's attention has {part}"
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    if name == "varlen" and attention.varlen_attn is None:
        return f"torch {torch.__version__} has no torch.nn.attention.varlen"
    if name == "flash_attention_2" and importlib.util.find_spec("flash_attn") is None:
        return "the package flash-attn is not installed"
    if name == "flash_attention_2" and config.sequence_parallel > 1:
        return "learner.sequence_parallel works with varlen and sdpa only"
    if config.dtype == "float32":
        return "it computes in 16 bits, but learner.dtype is float32"
    capability = torch.cuda.get_device_capability()
    if capability < CAPABILITY:
        return "the GPU has compute capability {}.{}, but it needs {}.{}".format(*capability, *CAPABILITY)
    width = _head_width(model)
    if width > WIDEST_HEAD or width % 8:
        return f"the model's heads are {width} wide, but it takes multiples of 8 up to {WIDEST_HEAD}"
    return None


def varlen_lacks(model: PreTrainedConfig) -> str | None:
    """The part of the model's attention that `varlen` lacks; None if it has all.

    Sinks are scores without a value that take part in every softmax; with chunks, a token sees only its own chunk.
    """
    text = model.get_text_config()
    if text.model_type in WITH_SINKS:
        return "sinks"
    if getattr(text, "attn_logit_softcapping", None):
        return SOFT_CAPS
    return "chunks" if CHUNKED in (getattr(text, "layer_types", None) or ()) else None


def _head_width(model: PreTrainedConfig) -> int:
    text = model.get_text_config()
    return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


# Read by cuBLAS, whose workspace otherwise depends on what else runs, and by flash attention in transformers.
ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "FLASH_ATTENTION_DETERMINISTIC": "1"}


@contextmanager
def deterministic(seed: int) -> Iterator[None]:
    """Allow only deterministic algorithms within the block, with this seed; raises `UserError` if one is missing."""
    os.environ.update(ENVIRONMENT)
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True)
    try:
        yield
    except RuntimeError as error:
        if "use_deterministic_algorithms" not in str(error):
            raise
        raise UserError(f"run.deterministic: {str(error).splitlines()[0]}") from error
    finally:
        torch.use_deterministic_algorithms(False)
