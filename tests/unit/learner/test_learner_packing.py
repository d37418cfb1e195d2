"""Packing is deterministic, keeps to the budget and is even over ranks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from learner.batch import plan_micro_batches

LENGTHS = st.lists(st.integers(1, 300), min_size=0, max_size=60)


@given(LENGTHS, st.integers(1, 4), st.integers(1, 4), st.integers(8, 400))
def test_every_sample_has_exactly_one_place(lengths, mini_batches, ranks, budget):
    places = plan_micro_batches(lengths, mini_batches, ranks, budget).samples
    placed = [index for micros in places for by_rank in micros for held in by_rank for index in held]
    assert sorted(placed) == list(range(len(lengths)))
    assert len(places) == mini_batches


@given(LENGTHS, st.integers(1, 4), st.integers(1, 4), st.integers(8, 400))
def test_micro_batches_keep_to_the_budget_and_every_rank_has_as_many(lengths, mini_batches, ranks, budget):
    for micros in plan_micro_batches(lengths, mini_batches, ranks, budget).samples:
        assert micros
        assert all(len(by_rank) == ranks for by_rank in micros)
        for held in (held for by_rank in micros for held in by_rank):
            assert len(held) <= 1 or sum(lengths[index] for index in held) <= budget


def test_mini_batches_are_consecutive_parts_of_the_batch():
    places = plan_micro_batches([10] * 12, 3, 2, 1000).samples
    assert [sorted(i for by_rank in micros for held in by_rank for i in held) for micros in places] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
    ]


def test_ranks_of_one_micro_batch_have_like_amounts_of_work():
    lengths = [100, 90, 80, 70, 60, 50, 40, 30]
    (micros,) = plan_micro_batches(lengths, 1, 2, 200).samples
    for by_rank in micros:
        loads = [sum(lengths[index] for index in held) for held in by_rank]
        assert max(loads) - min(loads) <= max(lengths)
    assert len(micros) == 2


def test_a_sample_longer_than_the_budget_travels_alone():
    (micros,) = plan_micro_batches([500, 20, 20], 1, 1, 100).samples
    assert [[0]] in micros
    assert [[1, 2]] in micros


def test_the_same_lengths_give_the_same_plan():
    lengths = [37, 12, 37, 90, 12, 55]
    assert plan_micro_batches(lengths, 2, 2, 100) == plan_micro_batches(lengths, 2, 2, 100)
