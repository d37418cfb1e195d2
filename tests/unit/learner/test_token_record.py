"""What is kept of single tokens in the step that trained on them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from common.errors import UserError
from common.messages import Batch
from learner.batch import MicroBatch, rollout_batch
from learner.step_loss import PolicyOutput
from learner.token_record import TokenRecord, discard
from tests.unit.learner.test_learner_batch import LONG, ONE, TWO

NAMES = ["one", "two", "long"]
ROLLOUTS = rollout_batch(
    3, [[[0, 1]], [[2]]], {0: ONE, 1: TWO, 2: LONG}, [0.5, 1.0, -1.0], [0.0] * 3, 50, sample_ids=NAMES
)


def batch(kept: list[bool] | None, turns: list[list[float]] | None = None) -> Batch:
    return Batch(
        batch_id=3, sample_ids=NAMES, advantages=[0.5, 1.0, -1.0], rewards=[0.0] * 3, tokens=[5, 3, 4], kept=kept,
        turn_advantages=turns,
    )  # fmt: skip


def policy(micro: MicroBatch) -> PolicyOutput:
    """Log-probs and entropies that count up."""
    steps = torch.arange(micro.model_tokens, dtype=torch.bfloat16)
    return PolicyOutput(-steps.requires_grad_(), steps + 0.5)


def lines(folder: Path) -> list[dict[str, object]]:
    files = sorted(folder.glob("training_data/*"))
    return [json.loads(line) for path in files for line in path.read_text().splitlines()]


def recorded(record: TokenRecord, folder: Path) -> list[dict[str, object]]:
    for number, (micro,) in enumerate(ROLLOUTS.mini_batches):
        record.add(number, micro, policy(micro))
    record.write(folder, 3, 0)
    return lines(folder)


def test_kept_samples_have_their_tokens_and_the_step_that_trained_on_them(tmp_path: Path) -> None:
    assert recorded(TokenRecord(batch([False, True, True])), tmp_path) == [
        {"task_id": "two", "mini_batch": 0, "advantages": [1.0], "logprobs": [-2.0, -3.0], "entropies": [2.5, 3.5]},
        {"task_id": "long", "mini_batch": 1, "advantages": [-1.0], "logprobs": [0.0, -1.0, -2.0],
         "entropies": [0.5, 1.5, 2.5]},
    ]  # fmt: skip


def test_turns_with_advantages_of_their_own_are_told_apart(tmp_path: Path) -> None:
    record = TokenRecord(batch([True, False, False], [[0.25, -0.5], [1.0], [-1.0]]))
    assert [line["advantages"] for line in recorded(record, tmp_path)] == [[0.25, -0.5]]


def test_without_a_kept_episode_there_is_nothing_to_record() -> None:
    assert not TokenRecord(batch(None))
    assert not TokenRecord(batch([False, False, False]))


def test_a_batch_that_is_trained_on_again_replaces_its_record(tmp_path: Path) -> None:
    recorded(TokenRecord(batch([True, True, True])), tmp_path)
    assert [line["task_id"] for line in recorded(TokenRecord(batch([True, False, False])), tmp_path)] == ["one"]


def test_records_of_batches_that_will_be_trained_on_again_are_removed(tmp_path: Path) -> None:
    for version in (2, 3, 10):
        TokenRecord(batch([True, True, True])).write(tmp_path, version, 0)
    (tmp_path / "training_data/notes.txt").touch()
    discard(tmp_path, 3)
    assert {path.name for path in (tmp_path / "training_data").iterdir()} == {"2.0.jsonl", "notes.txt"}


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "training_data").touch()
    with pytest.raises(UserError, match=r"training_data/3\.0\.jsonl cannot be written: "):
        TokenRecord(batch([True, True, True])).write(tmp_path, 3, 0)
