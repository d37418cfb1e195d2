"""A critic's input, advantages and returns against sums written out, which models it can be, and what is refused."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, Olmo2Config

from common.config import AlgorithmConfig, LearnerConfig, SamplerConfig
from common.errors import UserError
from common.messages import Batch
from common.payload import Payload
from learner.batch.gae import gae, normalised, returns
from learner.batch.outcome import CriticTarget, token_rewards
from learner.batch.tensors import RolloutBatch
from learner.critic import Critic, load_value_model, with_explained_variance
from learner.memory_model import Zero, critic_sizes, divided, with_critic
from learner.step_loss import PolicyOutput
from learner.token_record import TokenRecord
from sampler.batches import OpenBatch
from sampler.records import OpenSample
from tests.support.learner import (
    ALONE,
    PACKER,
    VOCABULARY,
    joined,
    learner_config,
    make_payload,
    manifest,
    save_tiny_model,
)


def payload_of(*lengths: int) -> Payload:
    """One row of turns of so many model tokens, with a token of somebody else's before each."""
    ends = np.cumsum([1 + length for length in lengths])
    spans = np.array([[end - length, end] for end, length in zip(ends, lengths, strict=True)], np.int32)
    sampled = sum(lengths)
    versions = np.array([[0, 0, sampled]], np.int32)
    return Payload(np.ones(ends[-1], np.int32), spans, np.full(sampled, -1.0, np.float32), versions)


@pytest.mark.parametrize(
    ("returns", "expected"),
    [
        (0.75, [0, 0, 0, 0, 0, 0.75]),
        # The first turn got 0.25 of its own, the second cost 0.25.
        ([0.5, 0.25, 0.5], [0, 0.25, 0, -0.25, 0, 0.5]),
        # The episode goes on in another row, where 0.125 more was earned; the last turn here has all of it.
        ([0.5, 0.25, 0.625], [0, 0.25, 0, -0.375, 0, 0.625]),
    ],
)
def test_a_reward_stands_at_the_last_token_of_what_earned_it(returns, expected):
    assert token_rewards(payload_of(2, 2, 2), returns).tolist() == expected


def test_a_micro_batch_has_rewards_and_the_trackers_value_of_each_token():
    rows = [(payload_of(1, 2), 0.0), (payload_of(2), 0.0)]
    micro = PACKER.micro_batch(rows, critic=[CriticTarget(1.0, 0.25), CriticTarget([0.5], 0.75)])
    assert micro.rewards.tolist() == [0, 0, 1, 0, 0.5]
    assert micro.tracked.tolist() == [0.25, 0.25, 0.25, 0.75, 0.75]
    assert PACKER.micro_batch([], critic=[]).rewards.tolist() == []
    assert PACKER.micro_batch(rows).rewards is None


def test_the_learner_reads_returns_from_the_batch_by_sample_or_by_turn():
    rng = np.random.default_rng(0)
    sample = joined([make_payload(rng, 20), make_payload(rng, 30)])

    def share(**columns: Any) -> RolloutBatch:
        batch = manifest("a", [50], row_tokens=[[20, 30]], values=[0.25], **columns)
        return PACKER.own_share(batch, lambda _: [sample], LearnerConfig(token_budget=100), ALONE)

    def rewards(**columns: Any) -> list[list[float]]:
        batch = share(**columns)
        micros = sorted((micro for micro in batch.mini_batches[0]), key=lambda micro: micro.input_ids.numel())
        rows = [row.tolist() for micro in micros for row in micro.rewards.split(micro.layout.lengths.tolist())]
        return sorted([number for number in row if number] for row in rows)

    assert rewards(returns=[[0.75]]) == [[0.75], [0.75]], "each row ends with the sample's reward"
    turns = [[0.0] * 4]
    assert rewards(turn_advantages=turns, returns=[[1.0, 0.5, 0.75, 0.25]]) == [[0.5, 0.25], [0.5, 0.5]]
    batch = share(turn_advantages=turns, returns=[[1.0, 0.5]])
    assert (batch.left_out, batch.reason) == (1, "2 returns for 4 turns")


def test_the_sampler_sends_rescaled_returns_and_the_trackers_values_to_a_critic():
    sampler = SamplerConfig(batch_size=2, tracker={"reward_range": (-1, 1)})

    def sent(baseline: str, **turns: Any) -> Batch:
        batch = OpenBatch(sampler, AlgorithmConfig(baseline=baseline))
        for number, (value, reward) in enumerate([(0.25, 1.0), (0.5, -1.0)]):
            batch.add(OpenSample(f"t{number}", number, value, reward, 9, 5, 0, 0, **turns))
        return batch.take_next().manifest

    tracked, judged = sent("tracker"), sent("critic")
    assert judged.values == [0.25, 0.5]
    assert judged.returns == [[1.0], [0.0]]
    assert judged.advantages == tracked.advantages, "for the critic's warm-up"
    assert (tracked.values, tracked.returns) == (None, None)
    by_turn = sent("both", turn_returns=[0.5, 0.0], turn_tokens=[2, 3])
    assert by_turn.returns == [[0.75, 0.5], [0.75, 0.5]]
    assert Batch.unpack(by_turn.pack()) == by_turn


def test_the_head_starts_at_zero_and_keeps_what_a_critics_folder_has(model, tmp_path):
    started = load_value_model(learner_config(model, tmp_path))
    assert {name for name, weight in started.named_weights() if not weight.any()} == {"score.weight", "score.bias"}
    torch.nn.init.constant_(started.model.score.weight, 0.5)
    started.model.save_pretrained(tmp_path / "critic")
    again = load_value_model(learner_config(str(tmp_path / "critic"), tmp_path))
    assert (again.model.score.weight == 0.5).all()
    assert not again.model.score.bias.any()


@pytest.mark.parametrize("is_frozen", [False, True])
def test_the_memory_table_counts_the_parameters_of_a_critic(model, tmp_path, is_frozen):
    loaded = load_value_model(learner_config(model, tmp_path, critic={"freeze_attention": is_frozen}))
    sizes, untrained = critic_sizes(AutoConfig.from_pretrained(model), is_frozen)
    assert sizes == [parameter.numel() for parameter in loaded.parameters()]
    assert untrained == sum(one.numel() for one in loaded.parameters() if not one.requires_grad)
    policy = divided(sizes, Zero(2, 2), 1000)
    both = with_critic(AutoConfig.from_pretrained(model), policy, Zero(2, 2), is_frozen)
    assert both.weights == 2 * policy.weights
    assert (both.optimizer == 2 * policy.optimizer) is not is_frozen
    assert both.activations == 1000
    # Without ZeRO and under stage 3, fp32 weights are their own master copy: two moments of 4 bytes are left.
    per_parameter = {
        stage: divided(sizes, Zero(stage, 1, weight_bytes=4), 0).optimizer / sum(sizes) for stage in range(4)
    }
    assert per_parameter == {0: 8, 1: 12, 2: 12, 3: 8}


def test_a_kept_episode_has_the_advantage_of_each_token(tmp_path):
    micro = PACKER.micro_batch([(payload_of(2), 0.5)], names=[("a", 0)], critic=[CriticTarget(1.0, 0.25)])
    record = TokenRecord(manifest("a", [3], advantages=[0.5], kept=[True]))
    judged = {"advantages": [-1.0, 0.25], "values": [0.5, 0.75], "returns": [1.0, 1.0]}
    with_values = replace(micro, **{name: torch.tensor(numbers) for name, numbers in judged.items()})
    record.add(0, with_values, PolicyOutput(torch.zeros(2), torch.zeros(2)))
    record.write(tmp_path, 1, 0)
    line = json.loads((tmp_path / "training_data" / "1.0.jsonl").read_text())
    assert (line["advantages"], line["token_advantages"]) == ([0.5], judged["advantages"])
    assert (line["values"], line["returns"]) == (judged["values"], judged["returns"])


def test_a_model_without_such_a_shape_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(Olmo2Config(num_hidden_layers=1).to_dict()))
    line = r"model.path = '.*' cannot be a critic: .* 'olmo2' .*; set algorithm.baseline=tracker, or critic.model"
    with pytest.raises(UserError, match=line):
        load_value_model(learner_config(str(tmp_path), "runs"), weights=False)
    with pytest.raises(UserError, match="^critic.model = '.*' cannot be a critic"):
        load_value_model(learner_config(str(tmp_path), "runs", critic={"model": str(tmp_path)}), weights=False)


def test_a_critic_of_another_vocabulary_is_refused(model, tmp_path):
    other = save_tiny_model(tmp_path / "other")
    config = learner_config(model, tmp_path, algorithm={"baseline": "critic"}, critic={"model": other})
    words = f"critic.model = '{other}' has {VOCABULARY} token ids, .* has 5: a critic reads"
    with pytest.raises(UserError, match=words):
        Critic(config, ALONE, 5)


def test_explained_variance_is_left_out_where_there_is_none_to_explain():
    spreads = {"critic/return_std": 0.5, "critic/error_std": 0.25, "critic/tracker_error_std": 0.5, "x": 1.0}
    assert with_explained_variance(spreads) == {
        "x": 1.0,
        "critic/explained_variance": 0.75,
        "critic/tracker_explained_variance": 0.0,
    }
    assert with_explained_variance(spreads | {"critic/return_std": 0.0}) == {"x": 1.0}
    of_a_broken_critic = {name: value for name, value in spreads.items() if name != "critic/error_std"}
    assert with_explained_variance(of_a_broken_critic) == {"x": 1.0, "critic/tracker_explained_variance": 0.0}


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
def test_gae_steps_over_what_is_not_the_models(seed, lengths, lam):
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


def test_advantages_are_z_scored_over_the_tokens_of_all_micro_batches():
    torch.manual_seed(0)
    parts = [torch.randn(3).double(), torch.zeros(0).double(), torch.randn(8).double() + 2]
    scored = normalised(parts, ALONE)
    assert [len(part) for part in scored] == [3, 0, 8]
    whole, together = torch.cat(scored), torch.cat(parts)
    torch.testing.assert_close(whole, ((together - together.mean()) / together.std()).float(), rtol=1e-5, atol=1e-6)
    assert torch.cat(normalised(parts, ALONE, clip=0.5)).abs().max() == 0.5


@pytest.mark.parametrize("values", [[], [3.0], [0.1] * 7], ids=["none", "one", "equal"])
def test_advantages_without_a_spread_are_zeros(values):
    (scored,) = normalised([torch.tensor(values, dtype=torch.float64)], ALONE)
    assert scored.tolist() == [0.0] * len(values)


def test_two_ranks_have_the_scores_of_one():
    torch.manual_seed(0)
    parts, sums = [torch.randn(5).double(), torch.randn(9).double() * 3], dict[int, list[float]]()
    barrier = Barrier(2)

    def scored(rank: int) -> list[torch.Tensor]:
        def sum_over_shares(values: list[float]) -> list[float]:
            sums[rank] = values
            barrier.wait(600)
            total = [sum(column) for column in zip(sums[0], sums[1], strict=True)]
            barrier.wait(600)
            return total

        return normalised([parts[rank]], SimpleNamespace(sum_over_shares=sum_over_shares))

    with ThreadPoolExecutor(2) as threads:
        shares = list(threads.map(scored, (0, 1)))
    expected = normalised(parts, ALONE)
    torch.testing.assert_close([share[0] for share in shares], expected, rtol=1e-6, atol=1e-6)
