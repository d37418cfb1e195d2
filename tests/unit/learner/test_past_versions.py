"""Tokens scored by the versions that sampled them: the log-probs are those of the weights at that time, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from common.payload import Payload
from learner.batch.tensors import MicroBatch, RolloutBatch
from learner.past_versions import PastVersions, exact_statistics, in_own_turn
from learner.policy.model import Policy, load_policy
from tests.support.learner import ALONE, PACKER, learner_config, make_payload

VERSIONS = 4


def step(policy: Policy, seed: int, share: float) -> None:
    """Change about so large a share of each parameter."""
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            moves = torch.rand(parameter.shape, generator=noise) < share
            parameter += moves * 0.1 * torch.randn(parameter.shape, generator=noise)


def copy_of(policy: Policy) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in policy.parameters()]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@torch.no_grad()
def score(policy: Policy, micro: MicroBatch) -> torch.Tensor:
    logprobs, _ = policy(micro.input_ids, micro.position_ids, micro.sequences, micro.predict, micro.targets)
    return logprobs[: micro.model_tokens]


@pytest.mark.parametrize(("share", "dtype"), [(0.02, torch.bfloat16), (0.4, torch.float32), (1.0, torch.bfloat16)])
def test_every_version_comes_back_bit_for_bit(model, share, dtype):
    policy = load_policy(learner_config(model, "runs")).to(dtype)
    past, versions = PastVersions(policy.parameters(), VERSIONS), [copy_of(policy)]
    for version in range(1, VERSIONS + 3):
        step(policy, version, share)
        past.advance()
        versions.append(copy_of(policy))
    with torch.no_grad():
        next(policy.parameters()).view(-1)[0] = torch.nan  # is equal to nothing, but is itself
    past.advance()
    versions.append(copy_of(policy))
    for _ in range(2):
        with past.travel() as back:
            seen = [(age, copy_of(policy)) for age in back]
        assert [age for age, _ in seen] == [1, 2, 3, 4]
        for age, weights in seen:
            assert all(map(same_bits, weights, versions[-1 - age]))
        assert all(map(same_bits, copy_of(policy), versions[-1]))
    whole = sum(parameter.nbytes for parameter in policy.parameters())
    assert past.bytes <= VERSIONS * whole
    assert share > 0.1 or past.bytes < 0.15 * VERSIONS * whole


def test_the_weights_come_back_if_scoring_fails(model):
    policy = load_policy(learner_config(model, "runs"))
    past = PastVersions(policy.parameters(), VERSIONS)
    step(policy, 1, 1.0)
    past.advance()
    now = copy_of(policy)

    def fails() -> None:
        with past.travel() as back:
            next(back)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails()
    assert all(map(torch.equal, copy_of(policy), now))


def test_the_engines_gap_is_told_from_staleness(model):
    """The engine is off by a constant, so its gap is known; staleness is what the weights' own scores say."""
    policy = load_policy(learner_config(model, "runs"))
    past = PastVersions(policy.parameters(), VERSIONS)
    rng, off = np.random.default_rng(0), 0.25
    payloads = [make_payload(rng, 40, version) for version in (1, 3, 5, 6)]
    engine: dict[int, list[np.ndarray]] = {}
    for version in range(7):
        if version:
            step(policy, version, 0.3)
            past.advance()
        engine[version] = [score(policy, PACKER.micro_batch([(one, 0.0)])).numpy() + off for one in payloads]
    rows = []
    for number, payload in enumerate(payloads):
        own = [engine[version][number][at] for at, version in enumerate(payload.versions().tolist())]
        rows.append(Payload(payload.token_ids, payload.model_spans, np.float32(own), payload.version_spans))
    batch = batch_of(6, rows)
    metrics = exact_statistics(batch, past, lambda micro: score(policy, micro), ALONE)
    versions = np.concatenate([row.versions() for row in rows])
    own = np.concatenate([in_own_turn(micro).numpy() for micro in batch.mini_batches[0]])
    kept = (versions >= 6 - VERSIONS) & own
    assert 0 < kept.mean() < own.mean() < 1
    assert metrics["exact/mixed"] == pytest.approx(1 - own.mean())
    assert metrics["exact/scored"] == pytest.approx(kept.mean())
    assert metrics["exact/engine_gap"] == pytest.approx(off, abs=1e-5)
    assert metrics["exact/engine_kl"] == pytest.approx(np.exp(-off) - 1 + off, abs=1e-5)
    now = np.concatenate([engine[6][number] for number in range(len(rows))])
    moved = np.abs(now - np.concatenate([row.logprobs for row in rows]))
    assert metrics["exact/staleness_gap"] == pytest.approx(moved[kept].mean(), rel=1e-4)
    assert metrics["exact/age_0/staleness_gap"] == 0.0
    assert metrics["exact/age_1/staleness_gap"] == pytest.approx(moved[(versions == 5) & own].mean(), rel=1e-4)
    assert "exact/age_5_plus/staleness_gap" not in metrics


def test_what_is_sampled_after_an_update_within_a_turn_is_of_no_version_alone():
    turns = np.array([[2, 5], [7, 11]], np.int32)  # of two rows, the first of which the update finds in its second turn
    versions = np.array([[3, 0, 5], [4, 5, 7]], np.int32)
    ids, logprobs = np.arange(11, dtype=np.int32), np.zeros(7, np.float32)
    rows = [Payload(ids, turns, logprobs, versions), Payload(ids, turns, logprobs, np.array([[4, 0, 7]], np.int32))]
    micro = PACKER.micro_batch([(row, 0.0) for row in rows])
    assert in_own_turn(micro).tolist() == [True] * 5 + [False] * 2 + [True] * 7
    assert in_own_turn(PACKER.micro_batch([])).tolist() == []


def batch_of(version: int, rows: list[Payload]) -> RolloutBatch:
    micros = [
        PACKER.micro_batch([(row, 0.0) for row in rows[:2]]),
        PACKER.micro_batch([(row, 0.0) for row in rows[2:]]),
    ]
    return RolloutBatch(version, [micros], len(rows), 0, rewards=[0.0] * len(rows))
