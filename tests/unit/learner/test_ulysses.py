"""Ranks that hold slices of packed tokens, as threads: together they compute what one rank computes with all tokens."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Barrier
from typing import Any

import pytest
import torch

from common.config import parse_config
from common.errors import UserError
from learner.policy.attention import across_ranks, pack_sequences, packed_sdpa
from learner.policy.model import load_policy, own_slice
from learner.ranks.ulysses import SequenceGroup
from tests.support.learner import save_tiny_model

SINKS = torch.linspace(-2, 2, 8, dtype=torch.float64)  # of eight heads


@dataclass(frozen=True, slots=True)
class Thread(SequenceGroup):
    """A rank that is a thread; `sent` and `barrier` are shared by all."""

    sent: dict[int, torch.Tensor] = field(default_factory=dict)
    barrier: Barrier = field(default_factory=lambda: Barrier(1))

    def exchange(self, parts: torch.Tensor) -> torch.Tensor:
        self.sent[self.rank] = parts
        self.barrier.wait()
        received = torch.stack([self.sent[rank][self.rank] for rank in range(self.size)])
        self.barrier.wait()
        return received


def on_threads(size: int, act: Any) -> list[Any]:
    """What `act(group)` returns on each of so many ranks."""
    sent: dict[int, torch.Tensor] = {}
    barrier = Barrier(size, timeout=600)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: act(Thread(rank, size, None, sent, barrier)), range(size)))


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("lengths", [[7, 12, 1, 9], [3], [8, 8]], ids=str)
@pytest.mark.parametrize("options", [{}, {"sliding_window": 4}, {"s_aux": SINKS}], ids=["all", "window", "sinks"])
def test_attention_over_slices_is_attention_over_all(size, lengths, options):
    """Also with fewer heads of keys than ranks, fewer tokens than ranks, and values of another width."""
    tokens, attention = sum(lengths), across_ranks(packed_sdpa)
    torch.manual_seed(0)
    shapes = (8, 4), (2, 4), (2, 6)  # heads and width of queries, keys and values
    tensors = [torch.randn(1, heads, tokens, width, dtype=torch.float64) for heads, width in shapes]
    padding = -tokens % size

    def on_rank(group: SequenceGroup) -> torch.Tensor:
        slices = [torch.nn.functional.pad(tensor, (0, 0, 0, padding)).chunk(size, 2)[group.rank] for tensor in tensors]
        sequences = pack_sequences(lengths).divided(group, padding)
        return attention(torch.nn.Module(), *slices, None, sequences=sequences, **options)[0]

    joined = torch.cat(on_threads(size, on_rank), dim=1)[:, :tokens]
    expected, _ = attention(torch.nn.Module(), *tensors, None, sequences=pack_sequences(lengths), **options)
    torch.testing.assert_close(joined, expected)


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("tokens", [1, 5, 8, 17])
def test_each_target_is_predicted_by_the_rank_that_has_its_token(size, tokens):
    ids, positions = torch.arange(100, 100 + tokens)[None], torch.arange(tokens)[None]
    predict = torch.arange(tokens)[tokens // 2 :]
    slices = [
        own_slice(SequenceGroup(rank, size, None), ids, positions, pack_sequences([tokens]), predict, predict + 1)
        for rank in range(size)
    ]
    assert len({own_ids.shape for own_ids, *_ in slices}) == 1
    assert torch.cat([own_ids for own_ids, *_ in slices], 1)[:, :tokens].equal(ids)
    seen = [own_ids[0, at] for own_ids, _, _, at, _, _ in slices]
    assert torch.cat(seen).tolist() == (100 + predict).tolist()
    assert torch.cat([targets for *_, targets, _ in slices]).equal(predict + 1)
    for *_, counts in slices:
        assert counts == [len(of_rank) for of_rank in seen]


@pytest.mark.parametrize(("size", "fits"), [(2, True), (4, True), (3, False), (8, False)])
def test_a_number_that_does_not_fit_the_heads_is_refused(tmp_path, size, fits):
    """The model has 4 heads of queries and 2 of keys."""
    settings = {"model": {"path": save_tiny_model(tmp_path)}, "data": {"train": "none.jsonl"}}
    config = parse_config(settings | {"learner": {"sequence_parallel": size, "dtype": "float32"}})
    if fits:
        load_policy(config, weights=False)
        return
    with pytest.raises(
        UserError, match=f"sequence_parallel = {size} does not fit the model's 4 heads of queries, 2 of"
    ):
        load_policy(config, weights=False)
