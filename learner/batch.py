"""From payloads to tensors: which samples share a micro-batch, and its tensors for model and losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heapreplace

import numpy as np
import torch

from common.config import LearnerConfig
from common.messages import Batch
from common.payload import Payload
from learner.attention import PackedSequences, pack_sequences
from learner.correction import Layout
from learner.world import World


@dataclass(frozen=True, slots=True)
class MicroBatchPlan:
    """Sample indices of each micro-batch: `samples[mini_batch][micro_batch][rank]` is a list, often empty."""

    samples: list[list[list[list[int]]]]

    def of_rank(self, rank: int) -> list[list[list[int]]]:
        """This rank's share: `[mini_batch][micro_batch]` lists of indices."""
        return [[ranks[rank] for ranks in micro_batches] for micro_batches in self.samples]


def plan_micro_batches(lengths: Sequence[int], mini_batches: int, ranks: int, token_budget: int) -> MicroBatchPlan:
    """Split a batch into mini-batches, and each of those into micro-batches of at most `token_budget` tokens.

    Every rank gets the same number of micro-batches, because their collectives must meet. A sample longer
    than the budget is a micro-batch of its own. Samples keep their batch's order between mini-batches.

    Args:
        lengths: tokens of each sample [B].
    """
    per_mini = -(-len(lengths) // mini_batches) if lengths else 0
    samples = []
    for mini in range(mini_batches):
        indices = list(range(mini * per_mini, min((mini + 1) * per_mini, len(lengths))))
        bins = _pack(indices, lengths, ranks, token_budget)
        samples.append([bins[start : start + ranks] for start in range(0, len(bins), ranks)])
    return MicroBatchPlan(samples)


def _pack(indices: Sequence[int], lengths: Sequence[int], ranks: int, budget: int) -> list[list[int]]:
    """A multiple of `ranks` bins, fullest first, so that the ranks of one micro-batch have similar amounts of work."""
    descending = sorted(indices, key=lambda index: (-lengths[index], index))
    rounds = max(1, -(-sum(min(lengths[index], budget) for index in indices) // (budget * ranks)))
    while True:
        bins = _fill_evenly(descending, lengths, rounds * ranks)
        if all(len(members) == 1 or tokens <= budget for tokens, members in bins if members):
            fullest_first = sorted(bins, key=lambda item: (-item[0], item[1]))
            return [sorted(members) for _, members in fullest_first]
        rounds += 1


def _fill_evenly(descending: Sequence[int], lengths: Sequence[int], count: int) -> list[tuple[int, list[int]]]:
    """Longest first, each into the emptiest bin: (tokens, indices) of each bin."""
    heap = [(0, number) for number in range(count)]
    heapify(heap)
    bins: list[list[int]] = [[] for _ in range(count)]
    for index in descending:
        tokens, number = heap[0]
        heapreplace(heap, (tokens + lengths[index], number))
        bins[number].append(index)
    return [(tokens, bins[number]) for tokens, number in heap]


# One number for all of a sample's model tokens, or one for each model span, which is a turn of the assistant.
Advantage = float | Sequence[float]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples that go through the model together.

    Attributes:
        input_ids: packed tokens, int64 [1, T].
        position_ids: positions inside each sample, int64 [1, T].
        sequences: where each sample begins and ends.
        predict: packed positions whose next token is a model token, int64 [N]; one position even if N is 0.
        targets: these next tokens, int64, as many.
        layout: which sample each model token belongs to.
        rollout_logprobs: log pi_rollout of the model tokens, float32 [N].
        advantages: float32 [N].
        versions: weight version that sampled each model token, int64 [N].
        sample_ids: of the samples, in order; empty if not needed.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    sequences: PackedSequences
    predict: torch.Tensor
    targets: torch.Tensor
    layout: Layout
    rollout_logprobs: torch.Tensor
    advantages: torch.Tensor
    versions: torch.Tensor
    sample_ids: Sequence[str] = ()

    @property
    def model_tokens(self) -> int:
        """The number N of model tokens."""
        return len(self.rollout_logprobs)

    def ages(self, version: int) -> torch.Tensor:
        """Versions between the weights that sampled each token and `version`, int64 [N]."""
        return (version - self.versions).clamp(min=0)


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """One rank's share of a batch.

    Attributes:
        version: weight version that trains on it.
        mini_batches: micro-batches of each optimizer step; all ranks have equally many.
        samples: samples of the whole batch, over all ranks.
        tokens: prompt and response tokens of this rank's samples.
        left_out: this rank's samples without a usable payload.
        rewards: of the whole batch.
    """

    version: int
    mini_batches: list[list[MicroBatch]]
    samples: int
    tokens: int
    left_out: int = 0
    rewards: Sequence[float] = field(default_factory=list)


def _is_usable(payload: Payload, advantage: Advantage, vocabulary: int) -> bool:
    """Whether a model of this many token ids can train on a payload, whose advantage is one number or one a turn."""
    if len(payload.logprobs) == 0 or (isinstance(advantage, Sequence) and len(advantage) != len(payload.model_spans)):
        return False
    ids = payload.token_ids
    # No token comes before token 0 to predict it.
    return bool(not payload.mask()[0] and ids.min() >= 0 and ids.max() < vocabulary)


def token_advantages(payload: Payload, advantage: Advantage) -> np.ndarray:
    """The sample's advantage, or its turns', at each model token, float32 [M]."""
    lengths = payload.model_spans[:, 1] - payload.model_spans[:, 0]
    if not isinstance(advantage, Sequence):
        return np.full(lengths.sum(), advantage, np.float32)
    return np.repeat(np.asarray(advantage, np.float32), lengths)


def micro_batch(
    samples: Sequence[tuple[Payload, Advantage]], device: torch.device | str = "cpu", sample_ids: Sequence[str] = ()
) -> MicroBatch:
    """Pack usable payloads with their advantages; none at all gives a micro-batch without model tokens."""
    if not samples:
        return _idle(device)
    lengths = [len(payload.token_ids) for payload, _ in samples]
    sampled = [len(payload.logprobs) for payload, _ in samples]
    tokens = np.concatenate([payload.token_ids for payload, _ in samples]).astype(np.int64)
    model_tokens = np.flatnonzero(np.concatenate([payload.mask() for payload, _ in samples]))

    def joined(values: Sequence[np.ndarray], dtype: type) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(values).astype(dtype)).to(device)

    return MicroBatch(
        input_ids=torch.from_numpy(tokens)[None].to(device),
        position_ids=torch.from_numpy(np.concatenate([np.arange(length) for length in lengths]))[None].to(device),
        sequences=pack_sequences(lengths, device),
        predict=torch.from_numpy(model_tokens - 1).to(device),
        targets=torch.from_numpy(tokens[model_tokens]).to(device),
        layout=Layout.of_lengths(sampled, device),
        rollout_logprobs=joined([payload.logprobs for payload, _ in samples], np.float32),
        advantages=joined([token_advantages(*sample) for sample in samples], np.float32),
        versions=joined([payload.versions() for payload, _ in samples], np.int64),
        sample_ids=sample_ids,
    )


def _idle(device: torch.device | str) -> MicroBatch:
    """A micro-batch for a rank without samples, so that collectives meet: it predicts a token and learns from none."""
    ids = np.zeros(2, np.int32)
    payload = Payload(ids, np.array([[1, 2]], np.int32), np.zeros(1, np.float32), np.array([[0, 0, 1]], np.int32))
    packed = micro_batch([(payload, 0.0)], device)
    return replace(
        packed,
        layout=Layout.of_lengths([], device),
        rollout_logprobs=packed.rollout_logprobs[:0],
        advantages=packed.advantages[:0],
        versions=packed.versions[:0],
    )


def rollout_batch(
    version: int,
    places: Sequence[Sequence[Sequence[int]]],
    payloads: Mapping[int, Payload | None],
    advantages: Sequence[Advantage],
    rewards: Sequence[float],
    vocabulary: int,
    device: torch.device | str = "cpu",
    sample_ids: Sequence[str] | None = None,
) -> RolloutBatch:
    """This rank's share of a batch, from its places in the plan and the payloads of those samples.

    Samples whose payload is missing or unusable, or has not as many turns as advantages, are left out and counted.

    Args:
        places: `[mini_batch][micro_batch]` lists of sample indices.
        payloads: by sample index.
        advantages: of the whole batch [B].
        sample_ids: of the whole batch [B], if its micro-batches need them.
    """
    kept = {
        index: payload
        for index, payload in payloads.items()
        if payload and _is_usable(payload, advantages[index], vocabulary)
    }

    def packed(indices: list[int]) -> MicroBatch:
        names = [sample_ids[i] for i in indices] if sample_ids else ()
        return micro_batch([(kept[i], advantages[i]) for i in indices], device, names)

    mini_batches = [
        [packed([i for i in indices if i in kept]) for indices in micro_batches] for micro_batches in places
    ]
    planned = sum(len(indices) for micro_batches in places for indices in micro_batches)
    return RolloutBatch(
        version=version,
        mini_batches=mini_batches,
        samples=len(advantages),
        tokens=sum(len(payload.token_ids) for payload in kept.values()),
        left_out=planned - len(kept),
        rewards=rewards,
    )


def own_share(
    batch: Batch,
    fetch: Callable[[list[str]], list[Payload | None]],
    config: LearnerConfig,
    world: World,
    vocabulary: int,
) -> RolloutBatch:
    """This rank's share of a batch that the sampler has sent.

    Args:
        fetch: payloads of samples by their ids, None for one that is gone.
        vocabulary: number of the model's token ids.
    """
    plan = plan_micro_batches(batch.tokens, config.mini_batches, world.size, config.token_budget)
    places = plan.of_rank(world.rank)
    indices = [index for micro_batches in places for held in micro_batches for index in held]
    payloads = fetch([batch.sample_ids[index] for index in indices])
    # The plan is made from the headers: a payload longer than its header says could exceed the device's memory, again
    # each time the batch is trained on.
    as_planned = {
        index: payload
        for index, payload in zip(indices, payloads, strict=True)
        if payload is not None and len(payload.token_ids) == batch.tokens[index]
    }
    advantages = batch.advantages if batch.turn_advantages is None else batch.turn_advantages
    return rollout_batch(
        batch.batch_id, places, as_planned, advantages, batch.rewards, vocabulary, world.device, batch.sample_ids
    )
