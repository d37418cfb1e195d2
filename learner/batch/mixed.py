"""Demonstrations that a batch of samples also learns from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from common.config import Config, LearnerConfig
from common.log import get_logger
from common.messages import Batch
from common.payload import Payload
from learner.batch.demonstrations import Demonstrations, folder_of, numbers_at
from learner.batch.teacher import weight_at
from learner.batch.tensors import MicroBatch, Packer, RolloutBatch
from learner.ranks.world import World


class Shown(NamedTuple):
    """This rank's share of the demonstrations of one optimizer step; all ranks have equally many micro-batches.

    Attributes:
        weight: of their loss beside the policy loss.
        total: the sum of the weights of their tokens, on all ranks.
    """

    micros: Sequence[MicroBatch] = ()
    weight: float = 0.0
    total: float = 0.0

    def loss(self, micro: MicroBatch, logprobs: torch.Tensor) -> torch.Tensor:
        """A micro-batch's share of the weighted mean of the tokens' negative log-probs, from log pi_theta [N]."""
        return -(micro.advantages * logprobs).sum() / self.total


class Mixed:
    """The demonstrations of `algorithm.demonstrations`, in the run folder.

    Which of them a batch learns from depends on its number and `run.seed` alone, so that a run continues from a
    checkpoint as if it had not stopped.
    """

    def __init__(self, config: Config, world: World) -> None:
        """Open the demonstrations; raises `UserError` if they cannot be read."""
        self._config, self._world = config, world
        self._demonstrations = Demonstrations.open(folder_of(config, "mixed"))

    def weight(self, version: int) -> float:
        """The weight of the demonstrations' loss in the batch with which weight version `version` is trained."""
        return weight_at(self._config.algorithm.demonstrations, version)

    def steps(self, version: int, packer: Packer) -> tuple[list[Shown], list[int]]:
        """This rank's demonstrations for each optimizer step, and the length in tokens of each of their rows.

        All ranks must call this together.
        """
        learner, size = self._config.learner, self._config.algorithm.demonstrations.batch_size
        weight = self.weight(version)
        if not weight:
            return [Shown()] * learner.mini_batches, []
        start = version * size
        numbers = numbers_at(start, start + size, len(self._demonstrations), self._config.run.seed)
        batch, payloads = self._demonstrations.batch(numbers, version, scaled=False)
        share = own_demonstrations(packer, batch, payloads, learner, self._world, get_logger())
        own = [sum(float(micro.advantages.sum()) for micro in micros) for micros in share.mini_batches]
        totals = self._world.sum_over_shares(own)
        # With more optimizer steps than demonstrations, some steps have none.
        steps = [
            Shown(micros, weight, total) if total else Shown()
            for micros, total in zip(share.mini_batches, totals, strict=True)
        ]
        return steps, list(share.lengths)


def own_demonstrations(
    packer: Packer, batch: Batch, payloads: Mapping[str, Payload], config: LearnerConfig, world: World, log: Any
) -> RolloutBatch:
    """This rank's share of demonstrations; warns of those that the model cannot be trained on, which are left out."""
    share = packer.own_share(batch, lambda ids: [payloads[one] for one in ids], config, world)
    if share.left_out and world.counts_share:
        log.warning("demonstrations left out", version=batch.batch_id, count=share.left_out, reason=share.reason)
    return share
