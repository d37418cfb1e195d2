"""Makes the configuration of supervised training from that of the run that follows it."""

from __future__ import annotations

import math

from pydantic import ValidationError

from common.config import AlgorithmConfig, Config, DriftConfig, LearnerConfig, TeacherConfig
from common.config.section import explain
from common.errors import UserError

# Every demonstration counts by its weight alone: nothing is compared, corrected or scored.
ALGORITHM = AlgorithmConfig.model_validate(
    {"method": "none", "loss": "reinforce", "correction": {"preset": "disabled"}}
)
LEARNER = {"mini_batches": 1, "exact_every": 0, "router_replay": "none"}


def supervised(config: Config) -> Config:
    """The configuration for training on the demonstrations of `config.sft`, in a run folder of its own.

    `with_steps` sets `run.steps`.

    Raises:
        UserError: a key or a value of `sft.learner` is wrong.
    """
    values = config.learner.model_dump() | config.sft.learner
    try:
        learner = LearnerConfig.model_validate(values | LEARNER)
    except ValidationError as error:
        raise UserError(explain(error, values, LearnerConfig, "sft.learner")) from None
    sampler = config.sampler.model_copy(
        update={"batch_size": config.sft.batch_size, "drift": DriftConfig(mode="constant")}
    )
    return config.model_copy(
        update={
            "run": config.run.model_copy(update={"experiment": config.sft.experiment}),
            "learner": learner,
            "sampler": sampler,
            "algorithm": ALGORITHM,
            "teacher": TeacherConfig(),
            # The temperature belongs to sampling; the supervised loss is that of the unscaled logits.
            "generator": config.generator.model_copy(update={"temperature": 1.0}),
        }
    )


def with_steps(config: Config, demonstrations: int) -> Config:
    """The configuration with the number of optimizer steps for this many demonstrations."""
    sft = config.sft
    steps = sft.steps or max(1, math.ceil(round(sft.epochs * demonstrations) / sft.batch_size))
    return config.model_copy(update={"run": config.run.model_copy(update={"steps": steps})})
