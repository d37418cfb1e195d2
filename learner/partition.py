"""Loads models; under ZeRO 3 in pieces, so that no rank ever holds the whole one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from common.config import Config, LearnerConfig
from common.model import check_model_folder
from learner.engine import deepspeed_config, join_deepspeed
from learner.model import Policy, load_policy
from learner.world import World


def load_on_ranks(config: Config, world: World) -> Policy:
    """Load the model that the configuration names; all ranks together.

    Raises:
        UserError: on every rank, see `load_policy`.
    """
    if config.learner.zero_stage < 3:
        return world.raise_on_all_ranks(lambda: load_policy(config))
    # In pieces, ranks wait for each other at every layer: what is wrong on one of them must be known before.
    shape = world.raise_on_all_ranks(lambda: _shape(config))
    with _divides_parameters(config.learner, world):
        policy = load_policy(config)
    buffers = dict(policy.model.named_buffers())
    for name, buffer in shape.model.named_non_persistent_buffers():
        # `zero.Init` gives all that a layer computes for itself the parameters' type: rotary frequencies in bfloat16.
        buffers[name].data = buffer.to(world.device)
    return policy


def _shape(config: Config) -> Policy:
    check_model_folder(config.model.path)
    return load_policy(config, weights=False)


@contextmanager
def _divides_parameters(config: LearnerConfig, world: World) -> Iterator[None]:
    """Within the block `from_pretrained` makes each layer's parameters under `zero.Init`, which keeps a rank's part.

    Rank 0 reads the files, and hands each layer to the others.
    """
    join_deepspeed(world)
    from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

    # transformers asks for it as long as it lives.
    settings = HfDeepSpeedConfig(deepspeed_config(config, world.device.type == "cuda", world.size))
    try:
        yield
    finally:
        unset_hf_deepspeed_config()
        del settings
