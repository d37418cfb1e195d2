"""From payloads to tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from common.config import LearnerConfig
from common.messages import Batch
from common.payload import Payload
from learner.batch import micro_batch, own_share, rollout_batch
from learner.stats import Stats
from learner.trainer import batch_statistics
from learner.world import World


def payload(ids, spans, logprobs, versions) -> Payload:
    return Payload(
        np.array(ids, np.int32),
        np.array(spans, np.int32),
        np.array(logprobs, np.float32),
        np.array(versions, np.int32),
    )


ONE = payload([5, 6, 7, 8, 9], [[2, 3], [4, 5]], [-1, -2], [[0, 0, 1], [3, 1, 2]])
TWO = payload([1, 2, 3], [[1, 3]], [-3, -4], [[3, 0, 2]])
LONG = payload([1, 2, 3, 4], [[1, 4]], [-5, -6, -7], [[2, 0, 3]])


def test_model_tokens_are_predicted_from_the_position_before_them():
    micro = micro_batch([(ONE, 0.5), (LONG, -1.0)])
    assert micro.input_ids.tolist() == [[5, 6, 7, 8, 9, 1, 2, 3, 4]]
    assert micro.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 3]]
    assert micro.predict.tolist() == [1, 3, 5, 6, 7]
    assert micro.targets.tolist() == [7, 9, 2, 3, 4]


def test_losses_see_model_tokens_only():
    micro = micro_batch([(ONE, 0.5), (LONG, -1.0)])
    assert micro.model_tokens == 5
    assert micro.layout.segment_ids.tolist() == [0, 0, 1, 1, 1]
    assert micro.layout.count == 2
    assert micro.rollout_logprobs.tolist() == [-1, -2, -5, -6, -7]
    assert micro.advantages.tolist() == [0.5, 0.5, -1, -1, -1]
    assert micro.versions.tolist() == [0, 3, 2, 2, 2]


def test_each_turn_has_its_own_advantage_where_there_is_one_for_each():
    micro = micro_batch([(ONE, [0.5, -2.0]), (LONG, [-1.0]), (TWO, 3.0)])
    assert micro.advantages.tolist() == [0.5, -2.0, -1, -1, -1, 3, 3]


@pytest.mark.parametrize("advantages", [[], [0.5], [0.5, 1.0, 2.0]])
def test_a_sample_with_other_turns_than_advantages_is_left_out_and_counted(advantages):
    batch = rollout_batch(4, [[[0, 1]]], {0: ONE, 1: TWO}, [advantages, [2.0]], [0.0, 1.0], 50)
    assert batch.left_out == 1
    assert batch.mini_batches[0][0].advantages.tolist() == [2.0, 2.0]


def test_a_micro_batch_without_samples_still_predicts_a_token_and_learns_from_none():
    micro = micro_batch([])
    assert len(micro.predict) == 1
    assert micro.model_tokens == 0
    assert micro.layout.count == 0


@pytest.mark.parametrize(
    ("what", "broken"),
    [
        ("missing", None),
        ("no model tokens", payload([1, 2], np.zeros((0, 2)), [], np.zeros((0, 3)))),
        ("nothing before the first token", payload([1, 2], [[0, 2]], [-1, -1], [[0, 0, 2]])),
        ("unknown token id", payload([1, 99], [[1, 2]], [-1], [[0, 0, 1]])),
        ("negative token id", payload([-1, 2], [[1, 2]], [-1], [[0, 0, 1]])),
    ],
)
def test_what_cannot_be_trained_on_is_left_out_and_counted(what, broken):
    batch = rollout_batch(4, [[[0, 1]]], {0: ONE, 1: broken}, [1.0, 2.0], [0.0, 1.0], 50)
    assert batch.left_out == 1
    assert batch.mini_batches[0][0].layout.count == 1


def test_token_ages_are_counted_by_bucket():
    batch = rollout_batch(3, [[[0], [1, 2]]], {0: ONE, 1: TWO, 2: LONG}, [0.0] * 3, [0.0] * 3, 50)
    stats = Stats()
    batch_statistics(batch, stats)
    metrics = stats.reduce()
    assert metrics["tokens/model"] == 7
    assert metrics["tokens/total"] == 12
    shares = {name: metrics[f"staleness/{name}"] for name in ("age_0", "age_1", "age_2", "age_3_4", "age_5_plus")}
    assert shares == pytest.approx({"age_0": 3 / 7, "age_1": 3 / 7, "age_2": 0, "age_3_4": 1 / 7, "age_5_plus": 0})
    assert metrics["staleness/mean"] == pytest.approx(6 / 7)
    assert metrics["staleness/max"] == 3


def test_a_payload_of_another_length_than_its_header_said_is_left_out():
    config = LearnerConfig(mini_batches=1, token_budget=100)
    world = World(0, 1, torch.device("cpu"))
    batch = Batch(
        batch_id=4, sample_ids=["one", "two", "gone"], advantages=[1.0, 2.0, 3.0], rewards=[0.0] * 3,
        tokens=[len(ONE.token_ids), len(TWO.token_ids) - 1, 9],
    )  # fmt: skip
    payloads = {"one": ONE, "two": TWO}
    share = own_share(batch, lambda ids: [payloads.get(sample) for sample in ids], config, world, 50)
    assert (share.left_out, share.version, share.samples) == (2, 4, 3)
    assert share.mini_batches[0][0].advantages.tolist() == [1.0, 1.0]
