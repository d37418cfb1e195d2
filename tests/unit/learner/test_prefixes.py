"""Rows that begin alike are packed as a tree, of which each is a branch; attention gives all their own results."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.errors import UserError
from learner.batch.prefixes import PackedRows, pack_rows, tree_places
from learner.policy.attention import pack_sequences, packed_sdpa, packed_varlen
from tests.support.attention import tensors_of, varlen_reference

# Rows of two token ids, so that many begin alike, and some are the beginning of another or its equal.
ROWS = st.lists(st.lists(st.integers(299, 300), min_size=1, max_size=6), min_size=1, max_size=12)


def arrays(rows: list[list[int]]) -> list[np.ndarray]:
    return [np.array(row, np.int32) for row in rows]


@given(ROWS)
def test_every_beginning_has_one_place(rows):
    beginnings = [tuple(row[: end + 1]) for row in rows for end in range(len(row))]
    place_of = dict(zip(beginnings, tree_places(arrays(rows)).tolist(), strict=True))
    assert sorted(place_of.values()) == list(range(len(set(beginnings))))
    assert [place_of[one] for one in beginnings] == tree_places(arrays(rows)).tolist()


@given(ROWS, st.booleans())
def test_packed_rows_are_the_rows(rows, share):
    packed = pack_rows(arrays(rows), share)
    at = slice(None) if packed.places is None else packed.places
    assert packed.tokens[at].tolist() == [token for row in rows for token in row]
    assert packed.positions[at].tolist() == [position for row in rows for position in range(len(row))]


@pytest.mark.parametrize(
    ("rows", "share", "tokens"),
    [
        ([[1, 2, 3], [1, 2, 4]], True, 4),
        ([[1, 2, 3], [1, 2, 4]], False, 6),
        ([[1, 2, 3], [4, 2, 3]], True, 6),
        ([[1, *range(9)], [1, *range(20, 29)]], True, 20),  # one of twenty
        ([[1, 2, 3]], True, 3),
    ],
)
def test_rows_that_share_little_are_packed_end_to_end(rows, share, tokens):
    packed = pack_rows(arrays(rows), share)
    assert (len(packed.tokens), packed.places is None) == (tokens, tokens == sum(map(len, rows)))


def tree() -> tuple[PackedRows, list[int]]:
    """Rows of uneven lengths that share two beginnings, and one that shares none; their lengths."""
    first, second = list(range(12)), list(range(50, 55))
    rows = [[*first, 20, 21], [7, 8, 9], [*first, *range(30, 50)], [*first, *second, 1], [*first, *second, 2, 3]]
    return pack_rows(arrays(rows), True), list(map(len, rows))


@pytest.mark.parametrize(
    ("kernel", "options"),
    [
        ("sdpa", {}),
        ("varlen", {}),
        ("sdpa", {"sliding_window": 4}),
        ("varlen", {"sliding_window": 4}),
        ("sdpa", {"s_aux": torch.ones(4)}),  # sinks
    ],
)
def test_attention_over_a_tree_is_attention_over_its_branches(kernel, options):
    packed, lengths = tree()
    assert packed.places is not None
    at = torch.from_numpy(packed.places)
    outputs, gradients = [], []
    for is_tree in (True, False):
        tensors = [tensor.requires_grad_() for tensor in tensors_of([len(packed.tokens)])]
        given = tensors if is_tree else [tensor[:, :, at] for tensor in tensors]
        sequences = pack_sequences(lengths, places=packed.places if is_tree else None)
        named = options | {"sequences": sequences}
        if kernel == "varlen":
            output, _ = packed_varlen(varlen_reference, torch.nn.Module(), *given, None, **named)
        else:
            output, _ = packed_sdpa(torch.nn.Module(), *given, None, **named)
        outputs.append(output[:, at] if is_tree else output)
        (outputs[-1] * torch.arange(outputs[-1].numel()).view_as(outputs[-1]).cos()).sum().backward()
        gradients.append([tensor.grad for tensor in tensors])
    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(*gradients)


def test_gradients_of_a_token_of_many_rows_are_added_up_exactly():
    """In bfloat16 a sum of ones stays at 256."""
    rows = [np.array([1, 2 + i], np.int32) for i in range(1000)]
    packed = pack_rows(rows, True)
    tensors = [torch.ones(1, 1, len(packed.tokens), 8, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    output, _ = packed_sdpa(
        torch.nn.Module(), *tensors, None, sequences=pack_sequences([2] * len(rows), places=packed.places)
    )
    output[:, 1:].sum().backward()  # of each row's own token, which reads both with half the weight
    assert tensors[2].grad is not None
    assert tensors[2].grad[0, 0, 0].tolist() == [500.0] * 8


def test_flash_attention_names_what_reads_shared_prefixes():
    packed, lengths = tree()
    with pytest.raises(UserError, match=r"set learner\.attention to varlen or sdpa"):
        pack_sequences(lengths, places=packed.places).flash_arguments()
