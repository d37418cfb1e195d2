"""avg@k, maj@k and pass@k against brute force: every draw and every order of the responses."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from statistics import fmean

import numpy as np
import pytest

from sampler.evaluation_metrics import Response, maj_at_k, pass_at_k, powers_of_two, summarize, summarize_groups


def first_majority(order: list[tuple[float, str]]) -> float:
    """Score of the first response with the most frequent answer; among equals, the answer that came first."""
    votes = Counter(answer for _, answer in order if answer)
    if not votes:
        return 0.0
    winner, _ = votes.most_common(1)[0]  # the first of those with most votes
    return next(score for score, answer in order if answer == winner)


@pytest.mark.parametrize("seed", range(5))
def test_maj_at_k_is_the_mean_over_all_orders(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 7))
    answers = rng.choice(["", "1", "2", "3"], n).tolist()
    scores = rng.integers(0, 2, n).astype(float).tolist()
    responses = list(zip(scores, answers, strict=True))
    expected = fmean(first_majority(list(order)) for order in itertools.permutations(responses))
    assert maj_at_k(scores, answers) == pytest.approx(expected)


def test_ties_count_half_and_missing_answers_do_not_vote() -> None:
    assert maj_at_k([1, 1, 0, 0], ["a", "a", "b", "b"]) == 0.5
    assert maj_at_k([1, 0, 0, 0], ["a", "", "", ""]) == 1.0
    assert maj_at_k([1, 1], ["", ""]) == 0.0, "there is no vote"
    assert maj_at_k([1, 0, 0], ["a", "a", "b"]) == 0.5, "the same answer, once in the wrong form"
    assert math.isnan(maj_at_k([], []))


@pytest.mark.parametrize("n", [1, 4, 6])
def test_pass_at_k_is_the_share_of_draws_with_a_correct_response(n: int) -> None:
    for correct, k in itertools.product(range(n + 1), range(1, n + 1)):
        draws = list(itertools.combinations([True] * correct + [False] * (n - correct), k))
        assert pass_at_k(n, correct, k) == pytest.approx(sum(map(any, draws)) / len(draws))


@pytest.mark.parametrize(("n", "correct", "k"), [(4, 1, 5), (4, 1, 0), (4, 5, 1), (4, -1, 1)])
def test_pass_at_k_refuses_what_cannot_be_drawn(n: int, correct: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"pass@{k} of {n} responses"):
        pass_at_k(n, correct, k)


@pytest.mark.parametrize(("n", "ks"), [(1, [1]), (2, [1, 2]), (5, [1, 2, 4, 5]), (8, [1, 2, 4, 8])])
def test_pass_at_k_is_given_for_powers_of_two_and_for_n(n: int, ks: list[int]) -> None:
    assert powers_of_two(n) == ks


ROWS = [
    Response(0, 1.0, "4"), Response(0, 0.0, "5"), Response(0, 0.0, "5"), Response(0, 0.5, ""),
    Response(1, 1.0, "7"), Response(1, 1.0, "7"), Response(1, None), Response(1, 0.0, "8"),
]  # fmt: skip


def test_a_summary_is_a_mean_and_counts_what_was_skipped() -> None:
    assert summarize(ROWS, samples=4) == pytest.approx(
        {
            "accuracy": 3 / 7,
            "reward": 3.5 / 7,
            "samples": 7,
            "set_aside": 1,
            "avg@4": (1 / 4 + 2 / 3) / 2,
            "maj@4": (0 + 1) / 2,
            "pass@1": (1 / 4 + 2 / 3) / 2,
            "pass@2": (1 / 2 + 1) / 2,
            "pass@4": 1.0,  # of the prompt with four responses
        }
    )
    assert summarize(ROWS[:1], samples=1) == {"accuracy": 1.0, "reward": 1.0, "samples": 1.0, "set_aside": 0.0}
    lenient = summarize(ROWS, samples=4, right_from=0.5)
    assert (lenient["accuracy"], lenient["reward"], lenient["pass@4"]) == (4 / 7, 3.5 / 7, 1.0)
    unnamed = summarize([Response(0, 1.0), Response(0, 1.0)], samples=2)
    assert (unnamed["avg@2"], math.isnan(unnamed["maj@2"])) == (1.0, True), "there is nothing to vote on"
    nothing = summarize([Response(0, None)], samples=2)
    assert (nothing.pop("samples"), nothing.pop("set_aside")) == (0.0, 1.0)
    assert len(nothing) == 6
    assert all(map(math.isnan, nothing.values()))


def test_groups_have_figures_of_their_own() -> None:
    figures = summarize_groups(ROWS, [["easy"]] * 4 + [["hard", "level=3"]] * 4, samples=4)
    expected = summarize(ROWS, samples=4)
    for group, rows in (("easy", ROWS[:4]), ("hard", ROWS[4:]), ("level=3", ROWS[4:])):
        expected |= {f"{group}/{name}": value for name, value in summarize(rows, samples=4).items()}
    assert figures == pytest.approx(expected, nan_ok=True)
