"""Demonstrations as samples: spans of equal weight, files, and an order that follows from seed and step."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from common.config import Config
from common.errors import UserError
from common.payload import check_payload
from launcher.sft.settings import with_steps
from learner.batch.demonstrations import NAMES, Demonstration, Demonstrations, numbers_at
from learner.batch.tensors import Packer, RolloutBatch
from learner.ranks.world import World
from learner.supervised import SupervisedLearner
from learner.trainer import Trainer
from tests.support.learner import ALONE, PACKER, VOCABULARY, learner_config


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


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("content", [None, np.zeros(0, np.int32), np.ones(7, np.int32)], ids=["cut", "empty", "other"])
def test_half_written_files_are_named(tmp_path: Path, name: str, content: np.ndarray | None) -> None:
    Demonstrations.of([demonstration([0, 1]), demonstration([0, 0.5, 0])]).save(tmp_path)
    file = tmp_path / f"{name}.npy"
    file.write_bytes(b"") if content is None else np.save(file, content)
    with pytest.raises(UserError, match=f"demonstrations {tmp_path} cannot be read"):
        Demonstrations.open(tmp_path)


class Bench(Trainer):
    """A trainer without a model, which records the batches that it is to train on."""

    def __init__(self, config: Config, world: World) -> None:
        self.seen: list[RolloutBatch] = []

    def packer(self) -> Packer:
        return PACKER

    def train(self, batch: RolloutBatch, *_: Any) -> dict[str, float]:
        self.seen.append(batch)
        return {"actor/pg_loss": 1.0}

    def loss_sums(self, batch: RolloutBatch) -> tuple[float, float]:
        tokens = sum(micro.model_tokens for micro in batch.micro_batches)
        return 2.0 * tokens, float(tokens)


def supervised_learner(
    monkeypatch: pytest.MonkeyPatch, folder: Path, rows: list[Demonstration], **sft: Any
) -> tuple[SupervisedLearner, dict[int, dict[str, float]], mock.Mock]:
    """A learner whose training and held-out data are these rows, the metrics it reports, and its log."""
    monkeypatch.setattr("learner.supervised.Trainer", Bench)
    monkeypatch.setattr("learner.supervised.Checkpoints", mock.Mock(**{"return_value.load.return_value": 0}))
    config, log = learner_config("none", folder), mock.Mock()
    config = with_steps(config.model_copy(update={"sft": config.sft.model_copy(update=sft)}), len(rows))
    config.run.folder.mkdir(parents=True)
    data, metrics = Demonstrations.of(rows), dict[int, dict[str, float]]()
    return SupervisedLearner(config, ALONE, data, data, metrics.__setitem__, log), metrics, log


def test_less_than_half_a_row_of_an_epoch_is_one_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = [demonstration([0, 1])] * 9
    learner, metrics, _ = supervised_learner(monkeypatch, tmp_path, rows, epochs=0.05, batch_size=4)
    assert learner.run()
    assert [batch.samples for batch in learner.trainer.seen] == [1]
    assert metrics[1]["sft/epoch"] == pytest.approx(1 / 9)


def test_demonstrations_that_the_model_cannot_read_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    foreign = Demonstration(np.array([1, VOCABULARY], np.int32), np.array([0, 1], np.float32))
    unled = demonstration([1, 1])
    learner, metrics, log = supervised_learner(monkeypatch, tmp_path, [unled, foreign], batch_size=2)
    assert learner.run()
    assert log.warning.call_args_list[0] == mock.call("demonstrations left out", version=0, count=2, reason=mock.ANY)
    assert "sft/heldout_loss" not in metrics[1]


@pytest.mark.parametrize("seed", [None, 0, 5])
def test_each_epoch_has_each_row_once_and_a_step_can_be_computed_alone(seed: int | None) -> None:
    count = 7
    whole = numbers_at(0, 4 * count, count, seed)
    epochs = [whole[start : start + count] for start in range(0, len(whole), count)]
    assert all(Counter(epoch) == Counter(range(count)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == (1 if seed is None else 4)
    assert [one for start in range(0, 4 * count, 4) for one in numbers_at(start, start + 4, count, seed)] == whole
