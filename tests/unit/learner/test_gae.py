"""Advantages and returns of the model's tokens, against sums written out step by step."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.batch.gae import gae, normalised, returns
from learner.ranks.world import World

ALONE = World(0, 1, torch.device("cpu"))
DECAYS = st.sampled_from([0.0, 0.3, 0.95, 1.0])


def by_brute_force(rewards: np.ndarray, values: np.ndarray, mask: np.ndarray, lambda_: float) -> np.ndarray:
    """GAE of one sequence with tokens of tools and users in it, as the O(T^2) sum over what follows each model token.

    Args:
        mask: tokens that the model sampled [T]; what the others have is not looked at.
    """
    steps = np.flatnonzero(mask)
    estimates = np.zeros(len(mask))
    for place, token in enumerate(steps):
        for ahead, later in enumerate(steps[place:]):
            behind = steps[place + ahead + 1 :]
            next_value = values[behind[0]] if len(behind) else 0.0
            error = rewards[later] + next_value - values[later]
            estimates[token] += lambda_**ahead * error
    return estimates


@given(seed=st.integers(0, 2**16), lengths=st.lists(st.integers(1, 23), min_size=1, max_size=4), lam=DECAYS)
def test_gae_steps_over_what_is_not_the_models(seed: int, lengths: list[int], lam: float) -> None:
    rng = np.random.default_rng(seed)
    masks = [rng.random(length) < 0.6 for length in lengths]
    rewards, values = ([rng.normal(size=length) for length in lengths] for _ in range(2))
    rows = list(zip(rewards, values, masks, strict=True))
    expected = np.concatenate([by_brute_force(*row, lam)[row[2]] for row in rows])
    # What the learner has of them: the model's tokens alone, row after row.
    flat_rewards, flat_values = (
        torch.from_numpy(np.concatenate([row[column][row[2]] for row in rows])) for column in (0, 1)
    )
    segment_ids = torch.from_numpy(np.repeat(np.arange(len(rows)), [mask.sum() for mask in masks]))
    estimates = gae(flat_rewards, flat_values, segment_ids, lam)
    torch.testing.assert_close(estimates, torch.from_numpy(expected), rtol=1e-9, atol=1e-9)
    learned = returns(flat_rewards, flat_values, segment_ids, lam)
    torch.testing.assert_close(learned, estimates + flat_values, rtol=1e-12, atol=1e-12)


def test_undiscounted_returns_are_the_reward_at_every_token_of_its_row() -> None:
    rewards = torch.tensor([0.0, 0.0, 1.0, 0.0, 0.25])
    segment_ids = torch.tensor([0, 0, 0, 1, 1])
    learned = returns(rewards, torch.rand(5), segment_ids, 1.0)
    torch.testing.assert_close(learned, torch.tensor([1.0, 1.0, 1.0, 0.25, 0.25]).double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("tokens", [0, 1])
def test_rows_of_no_token_or_one_have_estimates_too(tokens: int) -> None:
    estimates = gae(torch.ones(tokens), torch.full((tokens,), 0.25), torch.zeros(tokens).long(), 0.81)
    assert estimates.tolist() == [0.75] * tokens


def test_advantages_are_z_scored_over_the_tokens_of_all_micro_batches() -> None:
    torch.manual_seed(0)
    parts = [torch.randn(3).double(), torch.zeros(0).double(), torch.randn(8).double() + 2]
    scored = normalised(parts, ALONE)
    assert [len(part) for part in scored] == [3, 0, 8]
    whole, together = torch.cat(scored), torch.cat(parts)
    torch.testing.assert_close(whole, ((together - together.mean()) / together.std()).float(), rtol=1e-5, atol=1e-6)
    assert torch.cat(normalised(parts, ALONE, clip=0.5)).abs().max() == 0.5


@pytest.mark.parametrize("values", [[], [3.0], [0.1] * 7], ids=["none", "one", "equal"])
def test_advantages_without_a_spread_are_zeros(values: list[float]) -> None:
    (scored,) = normalised([torch.tensor(values, dtype=torch.float64)], ALONE)
    assert scored.tolist() == [0.0] * len(values)
    assert normalised([], ALONE) == []


class Ranks:
    """Two ranks as threads, whose sums meet."""

    def __init__(self) -> None:
        self.barrier, self.parts = Barrier(2), dict[int, list[float]]()

    def of(self, rank: int) -> Any:
        def sum_over_shares(values: list[float]) -> list[float]:
            self.parts[rank] = values
            self.barrier.wait(600)
            total = [sum(column) for column in zip(self.parts[0], self.parts[1], strict=True)]
            self.barrier.wait(600)
            return total

        world: Any = type("Rank", (), {"sum_over_shares": staticmethod(sum_over_shares)})
        return world


def test_two_ranks_have_the_scores_of_one() -> None:
    torch.manual_seed(0)
    parts, ranks = [torch.randn(5).double(), torch.randn(9).double() * 3], Ranks()
    with ThreadPoolExecutor(2) as threads:
        shares = list(threads.map(lambda rank: normalised([parts[rank]], ranks.of(rank)), (0, 1)))
    expected = normalised(parts, ALONE)
    torch.testing.assert_close([share[0] for share in shares], expected, rtol=1e-6, atol=1e-6)
