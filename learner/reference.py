"""The frozen reference policy of the KL penalty."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from common.config import Config
from learner.batch.tensors import MicroBatch
from learner.policy.engine import build_frozen_engine, load_on_ranks
from learner.policy.lora import adapter_off
from learner.policy.model import load_policy
from learner.ranks.world import World


def load_reference(config: Config, world: World, engine: Any) -> Callable[[MicroBatch], torch.Tensor] | None:
    """Load the reference policy, as a function that maps a micro-batch to log pi_ref of its model tokens [N].

    Without a KL penalty there is none. The model never changes, so it is not saved. Every rank holds it whole, or a
    part of it under ZeRO 3. If an adapter is trained on the same model, the reference is that model (in `engine`) with
    the adapter switched off, and takes no memory. Raises `UserError` if the model cannot be read.
    """
    algorithm = config.algorithm
    if algorithm.kl_coef == 0:
        return None
    path = algorithm.reference or config.model.path
    if config.learner.lora is not None and path == config.model.path:
        return partial(_score_without_adapter, engine)
    settings = config.model_copy(
        update={
            "model": config.model.model_copy(update={"path": path}),
            "learner": config.learner.model_copy(update={"lora": None, "router_replay": "none", "router_balance": 0.0}),
        }
    )
    key = "model.path" if algorithm.reference is None else "algorithm.reference"
    policy: Any = load_on_ranks(settings, world, partial(load_policy, key=key), key).eval().requires_grad_(False)
    if config.learner.zero_stage == 3:
        policy = build_frozen_engine(policy, config.learner, world)
    else:
        policy.to(world.device)
    return partial(score, policy)


@torch.no_grad()
def score(policy: Any, micro: MicroBatch) -> torch.Tensor:
    """Log-probs of a micro-batch's model tokens [N]."""
    logprobs, _ = policy(micro.input_ids, micro.position_ids, micro.sequences, micro.predict, micro.targets)
    return logprobs[: micro.model_tokens]


def _score_without_adapter(engine: Any, micro: MicroBatch) -> torch.Tensor:
    with adapter_off(engine.module):
        return score(engine, micro)
