"""Which weights an update lacks, by the names of a checkpoint, whatever the engine has made of its own."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.integration  # importing vLLM starts a process

PARTS = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
NAMES = {
    "embed_tokens.weight",
    *(f"layers.0.{part}.{leaf}" for part in PARTS["qkv_proj"] for leaf in ("weight", "bias")),
    *(f"layers.0.{part}.weight" for part in (*PARTS["gate_up_proj"], "down_proj", "norm")),
}
PLAIN, QUANTISED = "plain", "quantised"


@pytest.fixture(scope="module", autouse=True)
def _vllm() -> None:
    """Imported where it is used, and before a test begins, which may start no process."""
    import generator.weights.weight_names  # noqa: F401


class Layer(nn.Module):
    def __init__(self, method: str, dtype: torch.dtype = torch.bfloat16, bias: bool = False) -> None:
        from vllm.model_executor.layers.linear import UnquantizedLinearMethod

        super().__init__()
        self.quant_method = object.__new__(UnquantizedLinearMethod) if method == PLAIN else object()
        self.weight = nn.Parameter(torch.zeros(4, 4, dtype=dtype), requires_grad=False)
        if bias:
            self.bias = nn.Parameter(torch.zeros(4), requires_grad=False)
        if method == QUANTISED:
            self.input_scale = nn.Parameter(torch.zeros(1), requires_grad=False)


def output_layer() -> nn.Module:
    """An output layer of vLLM's that has its weight as any other."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    head = ParallelLMHead.__new__(ParallelLMHead)
    nn.Module.__init__(head)
    head.weight = nn.Parameter(torch.zeros(4, 4), requires_grad=False)
    return head


def model(method: str, *, dtype: torch.dtype = torch.bfloat16, head: bool = False) -> nn.Module:
    """A model that was recorded before its first load, as a method that quantises leaves it."""
    from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading

    whole = nn.Module()
    whole.packed_modules_mapping = PARTS  # type: ignore[assignment]
    whole.embed_tokens = Layer(PLAIN)
    block = nn.Module()
    block.qkv_proj = Layer(method, dtype, bias=True)
    block.gate_up_proj, block.down_proj = Layer(method, dtype), Layer(method, dtype)
    block.norm = nn.LayerNorm(4, bias=False)
    whole.layers = nn.ModuleList([block])
    if head:
        whole.lm_head = output_layer()
    record_metadata_for_reloading(whole)
    if method == QUANTISED:
        for layer in (block.qkv_proj, block.gate_up_proj, block.down_proj):
            del layer.weight
            layer.packed = nn.Parameter(torch.zeros(2, dtype=torch.int32), requires_grad=False)
            layer.computed_scale = nn.Parameter(torch.zeros(1), requires_grad=False)
    return whole


def settings(**text: Any) -> Any:
    return SimpleNamespace(hf_text_config=SimpleNamespace(**({"tie_word_embeddings": False} | text)))


def loaded(names: set[str]) -> set[str]:
    """The names that vLLM reports as loaded: packed layers by their own names, if any of their parts was there."""
    owner = {part: packed for packed, parts in PARTS.items() for part in parts}
    return {".".join(owner.get(part, part) for part in name.split(".")) for name in names}


GATE_UP = {name for name in NAMES if "gate_proj" in name or "up_proj" in name}
VALUES = {name for name in NAMES if "v_proj" in name}
# Weights that the update has, the model's configuration, and the name of one that is missing, if any is.
UPDATES = [
    (NAMES, {}, ""),
    *((NAMES - {name}, {}, f"lacks 1 weights of the model, among them {name}") for name in sorted(NAMES)[::4]),
    (NAMES - GATE_UP, {}, "among them layers.0.gate_up_proj.weight"),  # as vLLM names it
    (loaded(NAMES), {}, ""),  # a checkpoint that packs as vLLM does
    (NAMES - VALUES, {"attention_k_eq_v": True}, ""),
]


@pytest.mark.parametrize(("names", "config", "missing"), UPDATES)
@pytest.mark.parametrize("method", [PLAIN, QUANTISED])
def test_a_weight_that_is_missing_is_named(method: str, names: set[str], config: dict[str, bool], missing: str) -> None:
    refuses(model(method), config, names, missing)


def refuses(whole: nn.Module, config: dict[str, bool], names: set[str], missing: str) -> None:
    from generator.weights.weight_names import check_names

    if not missing:
        check_names(whole, settings(**config), names, loaded(names))
    else:
        with pytest.raises(ValueError, match=re.escape(missing)):
            check_names(whole, settings(**config), names, loaded(names))


def test_a_model_that_does_not_say_what_it_loaded_is_believed() -> None:
    from generator.weights.weight_names import check_names

    check_names(model(PLAIN), settings(), NAMES, None)


@pytest.mark.parametrize(
    ("tied", "same", "missing"),
    [
        (True, False, ""),
        (False, True, ""),  # some checkpoints have it although their configuration ties it: vLLM calls it untied
        (False, False, "among them lm_head.weight"),
    ],
)
def test_an_output_layer_is_needed_unless_it_is_the_embedding(tied: bool, same: bool, missing: str) -> None:
    whole = model(PLAIN, head=True)
    if same:
        whole.lm_head.weight = whole.embed_tokens.weight
    refuses(whole, {"tie_word_embeddings": tied}, NAMES, missing)


def test_a_model_that_was_quantised_on_disk_takes_no_updates() -> None:
    whole = model(QUANTISED, dtype=torch.float8_e4m3fn)
    refuses(whole, {}, NAMES, "qkv_proj.weight is float8_e4m3fn in the model's files")
