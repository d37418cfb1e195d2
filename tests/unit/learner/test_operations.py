"""The operations that are counted from a configuration are those of the model's forward pass."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from learner.policy.operations import Operations, operations_of
from tests.support.families import tiny

LENGTH = 24


@pytest.mark.parametrize(
    "family", ["Llama", "Exaone 4", "Gemma 4", "Cohere", "Qwen3-MoE", "GLM-4-MoE", "DeepSeek-V3", "gpt-oss", "LFM2"]
)
def test_operations_are_those_that_torch_counts(family):
    model = tiny(family)
    model.set_attn_implementation("eager")
    model.config._experts_implementation = "eager"  # torch does not count grouped products
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.arange(LENGTH)[None], use_cache=False)
    operations = operations_of(model.config)
    masked = LENGTH**2 * (operations.quadratic + sum(each for _, each in operations.windows))  # computed and discarded
    counted = counter.get_total_flops() - masked
    assert counted == pytest.approx(operations.linear * LENGTH + masked, rel=1e-3)  # convolutions are padded


def test_a_window_bounds_what_a_token_reads():
    limited, whole = Operations(1.0, 0.0, ((4, 2.0),)), Operations(1.0, 2.0)
    assert limited.of(4) == whole.of(4) == 4 + 2 * 16
    assert limited.of(6) - limited.of(5) == limited.of(106) - limited.of(105) == 1 + 2 * (2 * 4)


def test_windows_are_read_from_layer_types_or_hold_for_all_layers():
    sliding, full, everywhere = (operations_of(tiny(family).config) for family in ("OLMo 3", "Llama", "Mistral"))
    assert (sliding.windows, sliding.quadratic) == (((16, full.quadratic / 2),), full.quadratic / 2)
    assert (everywhere.windows, everywhere.quadratic) == (((4096, full.quadratic),), 0)
