"""The frozen reference policy of the KL penalty."""

from __future__ import annotations

from collections.abc import Callable

import torch

from common.config import Config
from learner.batch import MicroBatch
from learner.model import load_policy
from learner.world import World


def load_reference(config: Config, world: World) -> Callable[[MicroBatch], torch.Tensor] | None:
    """A function from a micro-batch to log pi_ref of its model tokens [N]; None where no KL is wanted.

    The model is held whole on every rank, and never changes: after a restart it is the same again.

    Raises:
        UserError: the model cannot be read.
    """
    algorithm = config.algorithm
    if algorithm.kl_coef == 0:
        return None
    path = algorithm.reference or config.model.path
    settings = config.model_copy(update={"model": config.model.model_copy(update={"path": path})})
    policy = load_policy(settings).to(world.device).eval().requires_grad_(False)

    @torch.no_grad()
    def score(micro: MicroBatch) -> torch.Tensor:
        logprobs, _ = policy(
            micro.input_ids, micro.position_ids, micro.sequences, micro.predict, micro.targets, entropy=False
        )
        return logprobs[: micro.model_tokens]

    return score
