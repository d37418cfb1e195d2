"""Exact log-probs of stale tokens: each scored by the version that sampled it (arXiv 2605.12070; docs/correction.md).

A token's recorded log-prob differs from its current one for two reasons: the engine and the learner compute different
numbers from the same weights, and the weights have changed since. With the weights of that version the learner
separates the two: log π_rollout − log π_exact is the engine's part, log π_exact − log π_old is staleness.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

import torch

from learner.batch.tensors import MicroBatch, RolloutBatch
from learner.correction.statistics import age_buckets, token_divergences
from learner.ranks.world import World
from learner.stats import Stats

# Views of these types compare bits, so that a NaN is equal to itself.
BITS = {2: torch.int16, 4: torch.int32}


@dataclass(slots=True)
class OlderValues:
    """The values of one parameter in the next older version.

    Attributes:
        values: [K], in host memory.
        where: positions in the flat parameter that differ, int32 [K] (int64 in large parameters); None means all.
    """

    values: torch.Tensor
    where: torch.Tensor | None

    def swap(self, parameter: torch.Tensor) -> None:
        """Exchange the values with the parameter's: the first call goes back a version, the second undoes it."""
        flat, older = parameter.detach().view(-1), self.values.to(parameter.device)
        if self.where is None:
            self.values = flat.to("cpu", copy=True)
            flat.copy_(older)
            return
        where = self.where.to(parameter.device, torch.int64)
        self.values = flat[where].cpu()
        flat[where] = older


class PastVersions:
    """The trained weights of the last versions, as lossless differences from one to the next, in host memory.

    The steps of reinforcement learning are so small that most bfloat16 weights do not change, so a version takes a few
    percent of the model's size. A process that has just started has no earlier version.

    Args:
        parameters: the trained parameters, whole on this rank, so not under ZeRO 3.
        most: versions to keep besides the current one.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], most: int) -> None:
        self._parameters = list(parameters)
        self._current = [parameter.detach().to("cpu", copy=True) for parameter in self._parameters]
        self._older: deque[list[OlderValues]] = deque(maxlen=most)  # newest first

    @property
    def bytes(self) -> int:
        """Host memory that the older versions take."""
        tensors = [tensor for step in self._older for one in step for tensor in (one.values, one.where)]
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def advance(self) -> None:
        """Store the current version as the previous one, and take the parameters' values as the new current version."""
        self._older.appendleft(
            [_difference(old, new.detach()) for old, new in zip(self._current, self._parameters, strict=True)]
        )

    @contextmanager
    def travel(self) -> Iterator[Iterator[int]]:
        """Within the block, each step of the iterator takes the parameters back one version, and yields the count.

        After the block the parameters are restored, bit for bit.
        """
        gone: list[list[OlderValues]] = []

        def back() -> Iterator[int]:
            for age, step in enumerate(self._older, 1):
                gone.append(step)
                self._swap(step)
                yield age

        try:
            yield back()
        finally:
            for step in reversed(gone):
                self._swap(step)

    def _swap(self, step: list[OlderValues]) -> None:
        for difference, parameter in zip(step, self._parameters, strict=True):
            difference.swap(parameter)


def _difference(old: torch.Tensor, new: torch.Tensor) -> OlderValues:
    """The values of `old` where `new` differs; `old` is overwritten by `new`."""
    current, before = new.cpu().view(-1), old.view(-1)
    bits = BITS[old.element_size()]
    where = (current.view(bits) != before.view(bits)).nonzero()[:, 0]
    if len(where) * (old.element_size() + 4) < old.nbytes:
        values = before[where]
        before[where] = current[where]
        return OlderValues(values, where.to(torch.int32 if old.numel() < 1 << 31 else torch.int64))
    values = before.clone()
    before.copy_(current)
    return OlderValues(values, None)


@torch.no_grad()
def exact_statistics(
    batch: RolloutBatch, past: PastVersions, score: Callable[[MicroBatch], torch.Tensor], world: World
) -> dict[str, float]:
    """Metrics `exact/…` of a batch, before it is trained on; all ranks together.

    Args:
        score: log-probs of a micro-batch's model tokens [N] by the weights as they are.
    """
    micros = batch.micro_batches
    ages = [micro.ages(batch.version) for micro in micros]
    now = [score(micro) for micro in micros]
    own = [in_own_turn(micro) for micro in micros]
    exact = [torch.where(age == 0, today, torch.nan) for age, today in zip(ages, now, strict=True)]
    (oldest,) = world.all_reduce_max([float(max((int(age.max()) for age in ages if len(age)), default=0))])
    with past.travel() as versions:
        for back in islice(versions, int(oldest)):
            if world.any_rank(any(bool((age == back).any()) for age in ages)):
                exact = [
                    torch.where(age == back, score(micro), known)
                    for age, micro, known in zip(ages, micros, exact, strict=True)
                ]
    stats, joined = Stats(), [torch.cat(parts) for parts in (own, ages, exact, now)]
    rollout = torch.cat([micro.rollout_logprobs for micro in micros])
    _report(stats, rollout, *joined)
    stats.total("exact/kept_mb", past.bytes / 1e6 if world.is_main else 0.0)
    return stats.reduce(world)


def in_own_turn(micro: MicroBatch) -> torch.Tensor:
    """Model tokens sampled by the version that read their turn's prompt, bool [N].

    After an update within a turn the engine keeps the turn's keys and values, so the rest of the turn is sampled by
    neither version alone.
    """
    predict = micro.predict[: micro.model_tokens]
    begins = torch.ones_like(predict, dtype=torch.bool)
    begins[1:] = predict[1:] != predict[:-1] + 1
    places = torch.arange(len(predict), device=predict.device)
    first = torch.where(begins, places, 0).cummax(0).values if len(predict) else places
    return micro.versions == micro.versions[first]


def _report(
    stats: Stats, rollout: torch.Tensor, own: torch.Tensor, ages: torch.Tensor, exact: torch.Tensor, now: torch.Tensor
) -> None:
    scored = (rollout + exact + now).isfinite() & own
    stats.total("tokens", float(len(rollout)))
    stats.mean("exact/mixed", ~own, over="tokens")
    stats.mean("exact/scored", scored, over="tokens")
    rollout, exact, now, ages = (values[scored] for values in (rollout, exact, now, ages))
    stats.total("scored", float(len(rollout)))
    gaps = {}
    for cause, x in (("engine", exact - rollout), ("staleness", now - exact)):
        gaps[f"exact/{{age}}/{cause}_gap"] = x.abs()
        stats.mean(f"exact/{cause}_gap", x.abs(), over="scored")
        stats.mean(f"exact/{cause}_kl", token_divergences(x)["k3_kl"], over="scored")
    stats.by_age(age_buckets(ages), gaps, {}, "exact/{age}/fraction", "scored")
