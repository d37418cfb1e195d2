"""Deltas of weights: nothing is lost, little is sent where little has changed, other bytes are refused."""

from __future__ import annotations

import contextlib
import functools

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from common.weights.delta import WrongDelta, decode, encode, encode_all, item_bytes
from learner.publish.weight_copy import copy_weights
from tests.support.weights import CHUNK, snapshot

SIZE = 1 << 16
compressed = zstandard.ZstdCompressor().compress


@functools.cache
def versions(changed: float) -> tuple[bytes, bytes]:
    """Bfloat16 weights, and the same with a share of them moved to the next number."""
    rng = np.random.default_rng(0)
    weights = (torch.from_numpy(rng.standard_normal(SIZE).astype(np.float32)) * 0.02).bfloat16()
    numbers = weights.view(torch.int16).numpy().copy()
    base = numbers.tobytes()
    numbers[rng.random(SIZE) < changed] += 1
    return base, numbers.tobytes()


@given(st.binary(max_size=200), st.binary(max_size=200), st.sampled_from([1, 2, 4, 8]))
def test_any_change_comes_back(one: bytes, other: bytes, width: int) -> None:
    size = min(len(one), len(other))
    base, chunk = one[:size] * 20, other[:size] * 20
    delta = encode(chunk, base, width)
    if delta is not None:
        assert decode(delta, base, width) == chunk


@pytest.mark.parametrize(("changed", "times"), [(0.0, 1000), (0.003, 100), (0.03, 20)])
def test_a_delta_is_in_proportion_to_what_changed(changed: float, times: int) -> None:
    base, chunk = versions(changed)
    delta = encode(chunk, base, 2)
    assert delta is not None
    assert len(delta) * times < len(chunk)
    assert decode(delta, base, 2) == chunk


def test_other_weights_have_no_delta() -> None:
    base, _ = versions(0)
    other = np.random.default_rng(0).bytes(len(base))
    same, *none = encode_all([base, other, base, None], [base, base, None, base], 2)
    assert decode(same, base, 2) == base
    assert none == [None, None, None]


@pytest.mark.parametrize(
    "delta",
    [
        b"",
        compressed(bytes(SIZE)),  # of a smaller chunk
        compressed(bytes(1 << 30)),  # 33 KB that would be a gigabyte
        zstandard.ZstdCompressor(write_content_size=False).compress(bytes(2 * SIZE)),
        compressed(bytes(2 * SIZE))[:-3],
    ],
    ids=["empty", "smaller", "larger", "of unknown size", "cut short"],
)
def test_bytes_that_are_no_delta_of_the_chunk_are_refused(delta: bytes) -> None:
    base, _ = versions(0)
    with pytest.raises(WrongDelta):
        decode(delta, base, 2)


@given(st.data())
def test_a_damaged_delta_is_refused_or_keeps_the_size(data: st.DataObject) -> None:
    base, chunk = versions(0.01)
    delta = bytearray(encode(chunk, base, 2) or b"")
    delta[data.draw(st.integers(0, len(delta) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with contextlib.suppress(WrongDelta):
        assert len(decode(bytes(delta), base, 2)) == len(base)


def test_planes_are_those_of_most_of_the_snapshot() -> None:
    tensors = {"weights": torch.zeros(100, dtype=torch.bfloat16), "counts": torch.zeros(20, dtype=torch.int64)}
    assert item_bytes(copy_weights(0, tensors.items(), torch.bfloat16, CHUNK).snapshot().manifest) == 2
    assert item_bytes(snapshot(0).manifest) == 4
    assert item_bytes(copy_weights(0, [], torch.bfloat16, CHUNK).snapshot().manifest) == 1
