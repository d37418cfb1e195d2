"""Packed sequences attend to themselves alone, exactly."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from common.errors import UserError
from learner.attention import pack_sequences, packed_sdpa

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


@pytest.mark.parametrize("window", [None, 5])
def test_each_sequence_gets_what_it_gets_alone(window):
    tensors = packed(LENGTHS)
    found, _ = packed_sdpa(torch.nn.Module(), *tensors, None, sequences=pack_sequences(LENGTHS), sliding_window=window)
    torch.testing.assert_close(found, alone(tensors, LENGTHS, window))


def test_a_sequence_does_not_depend_on_its_neighbours_bit_by_bit():
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


def test_gradients_stay_inside_their_sequence():
    tensors = [tensor.requires_grad_() for tensor in packed(LENGTHS)]
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


def test_parts_of_attention_that_are_missing_are_refused():
    with pytest.raises(UserError, match="softcap"):
        packed_sdpa(torch.nn.Module(), *packed([4]), None, sequences=pack_sequences([4]), softcap=30.0)
