"""From payloads to tensors: the samples of each micro-batch, the tokens they learn from, and the record of both."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from common.config import LearnerConfig
from common.errors import UserError
from common.messages import Batch
from common.payload import NO_EXPERTS, Payload
from learner.batch.plan import plan_micro_batches
from learner.batch.tensors import Packer, RolloutBatch
from learner.policy.operations import Operations
from learner.policy.routers import ExpertShape
from learner.ranks.ulysses import SequenceGroup
from learner.ranks.world import World
from learner.stats import Stats
from learner.step_loss import PolicyOutput
from learner.token_record import TokenRecord, discard
from learner.trainer import batch_statistics
from tests.support.golden import GOLDEN
from tests.support.learner import ALONE, joined, manifest, with_scores


def payload(ids: Any, spans: Any, logprobs: Any, versions: Any) -> Payload:
    arrays = (np.array(values, np.int32) for values in (ids, spans, versions))
    token_ids, model_spans, version_runs = arrays
    return Payload(token_ids, model_spans, np.array(logprobs, np.float32), version_runs)


def with_experts(one: Payload, lengths: list[int], experts: np.ndarray) -> Payload:
    return replace(one, experts=experts, expert_lengths=np.array(lengths, np.int32))


PACKER = Packer(50)
ONE = payload([5, 6, 7, 8, 9], [[2, 3], [4, 5]], [-1, -2], [[0, 0, 1], [3, 1, 2]])
TWO = payload([1, 2, 3], [[1, 3]], [-3, -4], [[3, 0, 2]])
LONG = payload([1, 2, 3, 4], [[1, 4]], [-5, -6, -7], [[2, 0, 3]])


def test_model_tokens_are_predicted_from_the_one_before():
    micro = PACKER.micro_batch([(ONE, 0.5), (LONG, -1.0)])
    assert micro.input_ids.tolist() == [[5, 6, 7, 8, 9, 1, 2, 3, 4]]
    assert micro.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 3]]
    assert micro.predict.tolist() == [1, 3, 5, 6, 7]
    assert micro.targets.tolist() == [7, 9, 2, 3, 4]
    assert (micro.model_tokens, micro.layout.count) == (5, 2)
    assert micro.layout.segment_ids.tolist() == [0, 0, 1, 1, 1]
    assert micro.rollout_logprobs.tolist() == [-1, -2, -5, -6, -7]
    assert micro.advantages.tolist() == [0.5, 0.5, -1, -1, -1]
    assert micro.versions.tolist() == [0, 3, 2, 2, 2]


def test_each_turn_has_its_own_advantage():
    micro = PACKER.micro_batch([(ONE, [0.5, -2.0]), (LONG, [-1.0]), (TWO, 3.0)])
    assert micro.advantages.tolist() == [0.5, -2.0, -1, -1, -1, 3, 3]


def test_a_micro_batch_without_samples_learns_from_no_token():
    micro = PACKER.micro_batch([])
    assert (len(micro.predict), micro.model_tokens, micro.layout.count) == (1, 0, 0)


LEARNER = LearnerConfig(mini_batches=1, token_budget=100)
UNUSABLE: dict[str, tuple[Payload | None, Any]] = {
    "missing": (None, 2.0),
    "no model tokens": (payload([1, 2], np.zeros((0, 2)), [], np.zeros((0, 3))), 2.0),
    "nothing before the first token": (payload([1, 2], [[0, 2]], [-1, -1], [[0, 0, 2]]), 2.0),
    "unknown token id": (payload([1, 99], [[1, 2]], [-1], [[0, 0, 1]]), 2.0),
    "negative token id": (payload([-1, 2], [[1, 2]], [-1], [[0, 0, 1]]), 2.0),
    "no advantages": (ONE, []),
    "fewer advantages than turns": (ONE, [0.5]),
    "more advantages than turns": (ONE, [0.5, 1.0, 2.0]),
    "experts of other layers": (with_experts(ONE, [4], np.zeros((4, 2, 2), np.uint8)), 2.0),
    "another number of experts": (with_experts(ONE, [4], np.zeros((4, 3, 1), np.uint8)), 2.0),
    "an unknown expert": (with_experts(ONE, [4], np.full((4, 3, 2), 8, np.uint8)), 2.0),
    "scores of sampled tokens": (with_scores(ONE, 0), 2.0),
    "scores of fewer tokens": (with_scores(ONE, 1), 2.0),
    "a score of an unknown token": (replace(with_scores(ONE, 2), teacher_ids=np.array([[1, 2], [3, 50]])), 2.0),
    "a token scored twice": (replace(with_scores(ONE, 2), teacher_ids=np.array([[1, 2], [3, 3]])), 2.0),
}
REASONS = {
    "missing": "",
    "unknown token id": "token ids from 1 to 99, but the model has 50 ids",
    "experts of other layers": "2 experts per token in 2 layers, but the model uses 2 in 3",
    "another number of experts": "1 experts per token in 3 layers, but the model uses 2 in 3",
    "an unknown expert": "expert 8, but the model has experts 0 to 7 in a layer",
    "scores of sampled tokens": "the teacher scored the sampled token at each position, but teacher.top_k = 2",
    "scores of fewer tokens": "the teacher scored its 1 likeliest tokens at each position, but teacher.top_k = 2",
    "a score of an unknown token": "the teacher scored token id 50, but the model has 50 ids",
    "a token scored twice": "the teacher lists the same token twice among its likeliest at one position",
}
SHAPE = ExpertShape(layers=3, chosen=2, experts=8)
ROUTED = Packer(50, experts=SHAPE)


@pytest.mark.parametrize("kind", UNUSABLE)
def test_what_cannot_be_trained_on_is_left_out_and_counted(kind):
    unusable, advantage = UNUSABLE[kind]
    payloads, advantages = {0: unusable, 1: TWO}, [advantage, [2.0]]
    batch = replace(ROUTED, top_k=2).rollout_batch(4, [[[(0, 0), (1, 0)]]], payloads, advantages, [0.0, 1.0])
    assert batch.left_out == 1
    assert batch.reason == REASONS.get(kind, batch.reason)
    assert bool(batch.reason) == (unusable is not None)
    assert batch.mini_batches[0][0].advantages.tolist() == [2.0, 2.0]


def test_experts_are_packed_with_their_tokens():
    ids = np.arange(18, dtype=np.uint8).reshape(3, 3, 2) % 8
    rows = [(with_experts(ONE, [3], ids), 1.0), (TWO, 1.0), (with_experts(LONG, [3], ids + 0), 1.0)]
    micro = ROUTED.micro_batch(rows)
    assert micro.known.tolist() == [True] * 3 + [False] * 2 + [False] * 3 + [True] * 3 + [False]
    assert torch.equal(micro.experts[micro.known], torch.from_numpy(np.concatenate([ids, ids])))
    assert micro.experts.dtype == torch.uint8
    many = Packer(50, experts=SHAPE._replace(experts=300)).micro_batch(rows)
    assert torch.equal(many.experts, micro.experts.to(torch.int16))
    for without in (PACKER.micro_batch(rows), ROUTED.micro_batch([(ONE, 1.0)]), ROUTED.micro_batch([])):
        assert (without.experts, without.known) == (None, None)


def test_token_ages_are_counted_by_bucket():
    batch = PACKER.rollout_batch(3, [[[(0, 0)], [(1, 0), (2, 0)]]], {0: ONE, 1: TWO, 2: LONG}, [0.0] * 3, [0.0] * 3)
    stats = Stats()
    batch_statistics(batch, stats)
    shares = {"age_0": 3 / 7, "age_1": 3 / 7, "age_2": 0, "age_3_4": 1 / 7, "age_5_plus": 0, "mean": 6 / 7, "max": 3}
    expected = {f"staleness/{name}": share for name, share in shares.items()}
    expected |= {"tokens/model": 7, "tokens/total": 12, "tokens/shared": 0, "batch/left_out": 0}
    assert stats.reduce() == pytest.approx(expected)


def test_a_payload_of_another_length_is_left_out():
    batch = manifest(["one", "two", "gone"], [5, 2, 9], advantages=[1.0, 2.0, 3.0])
    payloads = {"one": ONE, "two": TWO}
    share = PACKER.own_share(batch, lambda ids: [payloads.get(sample) for sample in ids], LEARNER, ALONE)
    assert (share.left_out, share.version, share.samples) == (2, 4, 3)
    assert "but its message says [2]" in share.reason
    assert share.mini_batches[0][0].advantages.tolist() == [1.0, 1.0]


def test_ranks_of_one_sequence_leave_out_what_one_of_them_misses(monkeypatch):
    """The other rank of the group did not get the second sample."""
    monkeypatch.setattr(World, "all_reduce_max", lambda world, missing: [max(missing[0], 0.0), max(missing[1], 1.0)])
    world = World(1, 2, ALONE.device, sequence=SequenceGroup(1, 2, None))
    share = PACKER.own_share(manifest(["one", "two"], [5, 3]), lambda ids: [ONE, TWO], LEARNER, world)
    assert share.left_out == 1
    assert share.mini_batches[0][0].names == [("one", 0)]


MIXED = joined([ONE, LONG])  # 2 and 3 model tokens


def shares_of_two_ranks(batch: Batch, payloads: dict[str, Payload], packer: Packer = PACKER) -> list[RolloutBatch]:
    """What each of two ranks trains on; a sample is fetched once by a rank."""

    def fetch(ids: list[str]) -> list[Payload | None]:
        assert len(set(ids)) == len(ids)
        return [payloads.get(sample) for sample in ids]

    config = LearnerConfig(mini_batches=1, token_budget=8)
    return [packer.own_share(batch, fetch, config, World(rank, 2, ALONE.device)) for rank in (0, 1)]


def test_rows_are_shares_of_all_the_tokens_of_their_prompt(monkeypatch):
    """Two samples answer a prompt each; a rank that has not got one of them hears of it from the other."""
    samples = {"mixed": MIXED, "two": TWO, "long": LONG, "one": ONE}
    tokens = [len(sample.token_ids) for sample in samples.values()]
    batch = manifest([*samples], tokens, row_tokens=[[5, 4], [], [], []])
    told: list[list[float]] = []

    def all_reduce_max(world: World, counts: list[float]) -> list[float]:
        told.append(counts)
        return [5.0, 2.0, 3.0, 2.0]

    monkeypatch.setattr(World, "all_reduce_max", all_reduce_max)
    shares: dict[tuple[str, int], float] = {}
    for part in shares_of_two_ranks(batch, samples, Packer(50, together=2)):
        for micro in part.mini_batches[0]:
            shares |= dict(zip(micro.names, micro.layout.shares.tolist(), strict=True))
    assert [max(counts) for counts in zip(*told, strict=True)] == [5.0, 2.0, 3.0, 2.0]
    of_first = {("mixed", 0): 2 / 7, ("mixed", 1): 3 / 7, ("two", 0): 2 / 7}
    assert shares == pytest.approx(of_first | {("long", 0): 3 / 5, ("one", 0): 2 / 5})


def test_rows_of_a_sample_are_trained_on_each_by_itself():
    turns = [[0.5, -2.0, 3.0], [4.0]]
    batch = manifest(["mixed", "two"], [9, 3], row_tokens=[[5, 4], []], turn_advantages=turns)
    shares = shares_of_two_ranks(batch, {"mixed": MIXED, "two": TWO})
    rows = {}
    for micro in (micro for share in shares for micro in share.mini_batches[0] if micro.names):
        columns = (micro.input_ids[0], micro.position_ids[0]), (micro.advantages, micro.versions)
        lengths = [{0: 5, 1: 4}[row] if name == "mixed" else 3 for name, row in micro.names]
        whole = [values.split(lengths) for values in columns[0]]
        sampled = [values.split(micro.layout.lengths.tolist()) for values in columns[1]]
        for name, share, *values in zip(micro.names, micro.layout.shares.tolist(), *whole, *sampled, strict=True):
            rows[name] = [share, *(value.tolist() for value in values)]
    assert rows == {
        ("mixed", 0): [0.4, [5, 6, 7, 8, 9], [0, 1, 2, 3, 4], [0.5, -2.0], [0, 3]],
        ("mixed", 1): [0.6, [1, 2, 3, 4], [0, 1, 2, 3], [3.0] * 3, [2, 2, 2]],
        ("two", 0): [1.0, [1, 2, 3], [0, 1, 2], [4.0, 4.0], [3, 3]],
    }
    assert sum(micro.layout.samples for share in shares for micro in share.mini_batches[0]) == 2
    assert (sum(sum(share.lengths) for share in shares), sum(share.left_out for share in shares)) == (12, 0)


BAD_ROW = joined([ONE, payload([1, 2], [[0, 2]], [-1, -1], [[0, 0, 2]])])


@pytest.mark.parametrize(
    ("sample", "row_tokens"),
    [(MIXED, [4, 5]), (MIXED, []), (BAD_ROW, [5, 2]), (None, [5, 4])],
    ids=["other rows", "one row", "a row without prompt", "missing"],
)
def test_a_sample_is_left_out_whole_and_counted_once(sample, row_tokens):
    batch = manifest(["bad", "long"], [sum(row_tokens) or 9, 4], row_tokens=[row_tokens, []])
    shares = shares_of_two_ranks(batch, {"long": LONG} | ({"bad": sample} if sample else {}))
    assert sum(share.left_out for share in shares) == 1
    names = [name for share in shares for micro in share.mini_batches[0] for name in micro.names]
    assert names == [("long", 0)]


ROWS = st.lists(st.lists(st.integers(1, 300), min_size=1, max_size=4), min_size=0, max_size=40)


@given(ROWS, st.integers(1, 4), st.integers(1, 4), st.integers(8, 400), st.sampled_from([0.0, 0.1]))
@example([[3]] * 5, 1, 1, 8, 0.0)  # two even bins would exceed the budget by one
def test_every_row_has_one_place_within_the_budget(rows, mini_batches, ranks, budget, quadratic):
    places = plan_micro_batches(rows, mini_batches, ranks, budget, Operations(1.0, quadratic).of).rows
    assert len(places) == mini_batches
    placed = []
    for micros in places:
        assert micros
        assert all(len(by_rank) == ranks for by_rank in micros)
        for held in (held for by_rank in micros for held in by_rank):
            placed += held
            assert len(held) <= 1 or sum(rows[sample][row] for sample, row in held) <= budget
    assert sorted(placed) == [(sample, row) for sample, lengths in enumerate(rows) for row in range(len(lengths))]


def test_mini_batches_are_consecutive_parts_of_the_batch():
    places = plan_micro_batches([[10], [5, 5]] * 6, 3, 2, 13).rows
    placed = [sorted(place for by_rank in micros for held in by_rank for place in held) for micros in places]
    rows = [(0, 0), (1, 0), (1, 1), (2, 0), (3, 0), (3, 1)]
    assert placed == [[(first + sample, row) for sample, row in rows] for first in (0, 4, 8)]


def test_ranks_of_one_micro_batch_have_like_amounts_of_work():
    lengths = [100, 90, 80, 70, 60, 50, 40, 30]
    (micros,) = plan_micro_batches([[length] for length in lengths], 1, 2, 200).rows
    assert len(micros) == 2
    for by_rank in micros:
        loads = [sum(lengths[sample] for sample, _ in held) for held in by_rank]
        assert max(loads) - min(loads) <= max(lengths)


@pytest.mark.parametrize("longest", [32_768, 65_536])
@pytest.mark.parametrize("ranks", [8, 32])
@pytest.mark.parametrize("budget", [1, 2], ids=["one longest row", "two longest rows"])
def test_the_slowest_rank_is_nearer_to_the_mean_than_if_ranks_had_equal_tokens(longest, ranks, budget):
    of_8b = Operations(1.5e10, 2.9e5)
    lengths = np.random.default_rng(0).lognormal(np.log(longest / 6), 1, 512).clip(16, longest).astype(int).tolist()

    def excess(operations):
        """Time that the other ranks of each micro-batch wait for its slowest one, as a share of their work."""
        (micros,) = plan_micro_batches([[length] for length in lengths], 1, ranks, budget * longest, operations).rows
        loads = np.array([[sum(of_8b.of(lengths[i]) for i, _ in held) for held in by_rank] for by_rank in micros])
        return loads.max(1).sum() / loads.mean(1).sum() - 1

    assert excess(of_8b.of) < excess(float) / 2


def test_b05_advantages_are_broadcast_to_model_tokens_only():
    case, samples = GOLDEN["B05"], []
    masks = np.array(case["inputs"]["model_token_mask"], int)
    for mask in masks:  # one prompt token, then a response whose model tokens are those of the mask
        borders, sampled = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]]))) + 1, int(mask.sum())
        samples.append(payload(range(1 + len(mask)), borders.reshape(-1, 2), np.zeros(sampled), [[0, 0, sampled]]))
    batch = PACKER.micro_batch(list(zip(samples, case["inputs"]["A_norm"], strict=True)))
    tokens = np.zeros(masks.shape)
    tokens[masks == 1] = batch.advantages.numpy()
    np.testing.assert_allclose(tokens, case["expected"]["token_advantages"], rtol=1e-6)


NAMES = ["one", "two", "long"]


@pytest.fixture(scope="module")
def rollouts() -> RolloutBatch:
    payloads, places = {0: ONE, 1: TWO, 2: LONG}, [[[(0, 0), (1, 0)]], [[(2, 0)]]]
    return PACKER.rollout_batch(3, places, payloads, [0.5, 1.0, -1.0], [0.0] * 3, sample_ids=NAMES)


def record_of(kept: list[bool] | None, turns: list[list[float]] | None = None) -> TokenRecord:
    advantages = [0.5, 1.0, -1.0]
    return TokenRecord(manifest(NAMES, [5, 3, 4], advantages=advantages, kept=kept, turn_advantages=turns))


def filled(record: TokenRecord, rollouts: RolloutBatch) -> TokenRecord:
    """The record with log-probs and entropies that count up."""
    for number, (micro,) in enumerate(rollouts.mini_batches):
        steps = torch.arange(micro.model_tokens, dtype=torch.bfloat16)
        record.add(number, micro, PolicyOutput(-steps.requires_grad_(), steps + 0.5))
    return record


def recorded(record: TokenRecord, folder: Path, rollouts: RolloutBatch) -> list[dict[str, Any]]:
    """The lines that it writes."""
    filled(record, rollouts).write(folder, 3, 0)
    return [json.loads(line) for line in (folder / "training_data" / "3.0.jsonl").read_text().splitlines()]


def test_kept_samples_are_recorded_and_a_repeated_batch_replaces(tmp_path, rollouts):
    assert recorded(record_of([False, True, True]), tmp_path, rollouts) == [
        {"task_id": "two", "row": 0, "mini_batch": 0, "advantages": [1.0], "token_ids": [2, 3],
         "token_versions": [3, 3], "rollout_logprobs": [-3.0, -4.0], "logprobs": [-2.0, -3.0],
         "entropies": [2.5, 3.5]},
        {"task_id": "long", "row": 0, "mini_batch": 1, "advantages": [-1.0], "token_ids": [2, 3, 4],
         "token_versions": [2, 2, 2], "rollout_logprobs": [-5.0, -6.0, -7.0], "logprobs": [0.0, -1.0, -2.0],
         "entropies": [0.5, 1.5, 2.5]},
    ]  # fmt: skip
    by_turn = record_of([True, False, False], [[0.25, -0.5], [1.0], [-1.0]])
    lines = recorded(by_turn, tmp_path, rollouts)
    assert [(line["task_id"], line["advantages"]) for line in lines] == [("one", [0.25, -0.5])]
    assert not record_of(None)
    assert not record_of([False, False, False])


def test_a_record_has_the_experts_and_scores_of_its_tokens(tmp_path):
    routed = with_experts(ONE, [4], np.arange(24, dtype=np.uint8).reshape(4, 3, 2) % 8)
    one = replace(routed, teacher_logprobs=np.array([[-0.5], [-0.25]], np.float32))
    rollouts = replace(ROUTED, top_k=0).rollout_batch(
        3, [[[(0, 0), (1, 0)]]], {0: one, 1: TWO}, [0.5, 1.0], [0.0] * 2, sample_ids=NAMES
    )
    taught, other = recorded(record_of([True, True, False]), tmp_path, rollouts)
    assert taught["experts"] == one.expert_sums()
    assert len(set(taught["experts"])) == 2
    assert other["experts"] == [NO_EXPERTS] * 2 == TWO.expert_sums()
    assert (taught["teacher_logprobs"], other["teacher_logprobs"]) == ([-0.5, -0.25], [None, None])


def test_a_record_is_on_the_disk_before_a_checkpoint_counts(tmp_path, monkeypatch):
    synced: dict[int, int] = {}
    monkeypatch.setattr("os.fsync", lambda file: synced.update({os.fstat(file).st_ino: os.fstat(file).st_size}))
    record_of([True, True, True]).write(tmp_path, 3, 0)
    written = (tmp_path / "training_data/3.0.jsonl").stat()
    assert synced[written.st_ino] == written.st_size


def test_records_of_batches_to_be_repeated_are_removed(tmp_path, rollouts):
    record = filled(record_of([True, True, True]), rollouts)
    for version in (2, 3, 10):
        record.write(tmp_path, version, 0)
    (tmp_path / "training_data/notes.txt").touch()
    discard(tmp_path, 3)
    assert {path.name for path in (tmp_path / "training_data").iterdir()} == {"2.0.jsonl", "notes.txt"}
    size = (tmp_path / "training_data/2.0.jsonl").stat().st_size
    for version in (3, 4, 5):
        for rank in (0, 1):
            record.write(tmp_path, version, rank, keep_bytes=4 * size)
    names = {path.name for path in (tmp_path / "training_data").iterdir()}
    assert names == {"4.0.jsonl", "4.1.jsonl", "5.0.jsonl", "5.1.jsonl", "notes.txt"}, "old versions make room"


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "training_data").touch()
    with pytest.raises(UserError, match=r"training_data/3\.0\.jsonl cannot be written: "):
        record_of([True, True, True]).write(tmp_path, 3, 0)
