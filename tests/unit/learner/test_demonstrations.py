"""Demonstrations as samples: spans of equal weight, files, and an order that follows from seed and step."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from common.errors import UserError
from common.payload import check_payload
from learner.batch.demonstrations import Demonstration, Demonstrations, numbers_at


def demonstration(weights: list[float]) -> Demonstration:
    return Demonstration(np.arange(len(weights), dtype=np.int32), np.array(weights, np.float32))


SPANS = {
    "one turn": ([0, 0, 1, 1], [[2, 4]], [1.0]),
    "two turns": ([0, 1, 0, 1], [[1, 2], [3, 4]], [1.0, 1.0]),
    "a first token that counts less": ([0, 0.25, 1, 1, 0], [[1, 2], [2, 4]], [0.25, 1.0]),
    "nothing": ([0, 0], [], []),
}


@pytest.mark.parametrize("case", SPANS)
def test_each_run_of_tokens_of_one_weight_is_a_span(case: str) -> None:
    weights, spans, of_spans = SPANS[case]
    payload, advantages = demonstration(weights).payload(7)
    check_payload(payload)
    assert payload.model_spans.tolist() == spans
    assert advantages == of_spans
    assert set(payload.versions().tolist()) <= {7}


def test_the_weights_of_a_batch_have_a_mean_of_1_over_its_trained_tokens() -> None:
    rows = Demonstrations.of([demonstration([0, 2, 2, 0.5]), demonstration([0, 0, 1])])
    batch, payloads = rows.batch([1, 0, 1], 3)
    assert batch.tokens == [3, 4, 3]
    assert [len(payloads[one].token_ids) for one in batch.sample_ids] == batch.tokens
    assert batch.turn_advantages is not None
    weights = [[1.0], [2.0, 0.5], [1.0]]
    mean = (1 + 2 + 2 + 0.5 + 1) / 5
    assert batch.turn_advantages == [[weight / mean for weight in row] for row in weights]
    assert rows.batch([1, 0], 3, scaled=False)[0].turn_advantages == [[1.0], [2.0, 0.5]]


def test_files_hold_them_and_missing_ones_are_named(tmp_path: Path) -> None:
    rows = [demonstration([0, 1]), demonstration([0, 0.5, 0])]
    Demonstrations.of(rows).save(tmp_path)
    read = Demonstrations.open(tmp_path)
    assert (len(read), read.tokens, read.trained_tokens) == (2, 5, 2)
    for number, row in enumerate(rows):
        assert read[number].token_ids.tolist() == row.token_ids.tolist()
        assert read[number].weights.tolist() == row.weights.tolist()
    with pytest.raises(UserError, match="none"):
        Demonstrations.open(tmp_path / "none")


@pytest.mark.parametrize("seed", [None, 0, 5])
def test_each_epoch_has_each_row_once_and_a_step_can_be_computed_alone(seed: int | None) -> None:
    count = 7
    whole = numbers_at(0, 4 * count, count, seed)
    epochs = [whole[start : start + count] for start in range(0, len(whole), count)]
    assert all(Counter(epoch) == Counter(range(count)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == (1 if seed is None else 4)
    assert [one for start in range(0, 4 * count, 4) for one in numbers_at(start, start + 4, count, seed)] == whole
