"""Who is praised for what: one step on episodes whose first turn was good and whose last was bad, and on average."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from common.config import AlgorithmConfig, SamplerConfig
from common.payload import Payload
from generator.rewards.scorer import returns_to_go
from learner.batch import micro_batch
from learner.losses import Denominators, ppo_clip
from learner.stats import Stats
from learner.step_loss import PolicyOutput, Precomputed, TrainPosition, step_loss
from sampler.batches import OpenBatch
from sampler.records import OpenSample

GOOD, BAD = 1, 0
# What was done in the two turns of each episode, and what the user gave for it.
EPISODES = [((GOOD, BAD), (1.0, -0.5)), ((GOOD, BAD), (1.0, -0.5)), ((BAD, GOOD), (0.0, 0.0))]
V = 0.0


def step(by_turn: bool) -> torch.Tensor:
    """How much more likely one step makes each action of each turn, [turn, action]; at first all are equally likely."""
    waiting = OpenBatch(SamplerConfig(batch_size=len(EPISODES)))
    payloads = []
    for number, (actions, rewards) in enumerate(EPISODES):
        returns = returns_to_go(0.0, rewards, (-1.0, 1.0))
        turns = [value - V for value in returns] if by_turn else []
        sample = OpenSample(f"t{number}", number, sum(rewards) - V, sum(rewards), 5, 2, 0, 0, turns, [1] * len(turns))
        waiting.add(sample)
        # Prompt, first turn, the user's words, second turn.
        ids, spans = np.array([5, actions[0], 6, actions[1]]), np.array([[1, 2], [3, 4]])
        payloads.append(Payload(ids, spans, np.full(2, np.log(0.5), np.float32), np.array([[0, 0, 2]])))
    batch = waiting.close().manifest
    micro = micro_batch(list(zip(payloads, batch.turn_advantages or batch.advantages, strict=True)))
    logits = torch.zeros(2, 2, requires_grad=True)
    turn = torch.tensor([0, 1] * len(EPISODES))
    policy = PolicyOutput(logits.log_softmax(-1)[turn, micro.targets], torch.zeros(len(turn)))
    config = AlgorithmConfig(correction={"preset": "disabled"})
    position = TrainPosition(0, 0, 1, Denominators(len(turn), len(EPISODES), 1))
    step_loss(micro, policy, Precomputed(), position, ppo_clip, config, Stats()).loss.backward()
    return (logits.detach() - 0.1 * logits.grad).softmax(-1) - 0.5


@pytest.mark.parametrize("by_turn", [False, True], ids=["episode", "turn"])
def test_a_bad_last_turn_is_not_praised_for_a_good_first_one(by_turn: bool) -> None:
    first, last = step(by_turn)
    assert first[GOOD] > 0.001
    assert last[BAD] < -0.001 if by_turn else last[BAD] > 0.001


@pytest.mark.parametrize("v", [0.0, 0.7])
def test_on_average_the_gradient_of_turns_is_that_of_the_reward_whatever_the_value(v: float) -> None:
    torch.manual_seed(0)
    first, last = (torch.randn(size, dtype=torch.float64, requires_grad=True) for size in ((2,), (2, 2)))
    user, user_last, final = (torch.randn(size, dtype=torch.float64) for size in ((2,), (2, 2), (2, 2)))
    reward, weighed = torch.zeros(()), torch.zeros(())
    # The last turn depends on the first, and so do its rewards; the range is so wide that it cuts nothing off.
    for a in (GOOD, BAD):
        for b in (GOOD, BAD):
            logprobs = torch.stack([first.log_softmax(-1)[a], last[a].log_softmax(-1)[b]])
            returns = returns_to_go(float(final[a, b]), [float(user[a]), float(user_last[a, b])], (-99.0, 99.0))
            probability = logprobs.sum().exp()
            reward = reward + probability * returns[0]
            weighed = weighed + probability.detach() * (torch.tensor(returns).double() - v) @ logprobs
    expected = torch.autograd.grad(reward, (first, last), retain_graph=True)
    found = torch.autograd.grad(weighed, (first, last))
    for one, other in zip(found, expected, strict=True):
        assert other.abs().max() > 0.01
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
