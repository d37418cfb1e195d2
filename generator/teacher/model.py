"""A teacher that this process computes, with an engine of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from common.config import Config, LearnerConfig, SandboxConfig, TeacherConfig
from common.errors import UserError
from common.payload import TOKEN
from generator.engine.arguments import check_engine_names
from generator.engine.engine import Engine
from generator.engine.temperature import WORKERS, set_temperature
from generator.teacher.scores import Scores
from generator.teacher.vocabulary import check_vocabulary

# vLLM computes the logits of all prompt tokens of a step at once, which its share of the memory does not count: 2048
# tokens of a vocabulary of 150,000 are 1.2 GB in float32.
TOKENS_A_STEP = 2048
# What the settings of `engine_config` are called in the configuration of the user.
NAMES = {"generator.engine": "teacher.engine", "model.path": "teacher.model", "model.dtype": "teacher.dtype"}


def engine_config(config: Config, teacher: TeacherConfig) -> Config:
    """The configuration of a run without a learner whose policy is the teacher: what its engine is started with."""
    arguments = {"max_num_batched_tokens": TOKENS_A_STEP, "worker_extension_cls": WORKERS}
    model = {"path": teacher.model, "dtype": teacher.dtype or config.model.dtype}
    generator = {"engine": arguments | teacher.engine, "max_concurrency": teacher.max_concurrency}
    return config.model_copy(
        update={
            "run": config.run.model_copy(update={"steps": 0}),
            "model": config.model.model_copy(update=model),
            "generator": config.generator.model_copy(update=generator),
            "learner": LearnerConfig(),
            "sandbox": SandboxConfig(),
        }
    )


@contextmanager
def naming_the_teacher() -> Iterator[None]:
    """Errors about `engine_config` name the keys of the section `teacher`."""
    try:
        yield
    except UserError as error:
        message = str(error)
        for name, own in NAMES.items():
            message = message.replace(name, own)
        raise UserError(message) from None


class ModelScorer:
    """Scores with vLLM, at the temperature at which the policy samples."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @classmethod
    async def start(cls, config: Config, teacher: TeacherConfig, log: Any) -> ModelScorer:
        """Start vLLM with the teacher; blocks for seconds.

        Raises:
            UserError: its vocabulary is not the policy's, it cannot be read, or vLLM refuses its arguments.
        """
        own = engine_config(config, teacher)
        check_vocabulary(config.model.path, own.model.path, config.model.trust_remote_code)
        with naming_the_teacher():
            check_engine_names(own)
            engine = await Engine.start(own, log)
            size = engine.llm.model_config.get_vocab_size()
            try:
                if teacher.top_k > size:
                    raise UserError(f"teacher.top_k = {teacher.top_k}, and model.path has {size} tokens; lower it")
                await set_temperature(engine.llm, config.generator.temperature)
            except UserError:
                await engine.close()
                raise
        return cls(engine)

    async def score(self, token_ids: np.ndarray, top_k: int) -> Scores:
        """Scores of a row [T]; raises like `Engine.score`."""
        if top_k:
            ids, logprobs = await self._engine.score(token_ids, top_k)
            return Scores(logprobs, ids)
        logprobs = await self._engine.score(token_ids)
        return Scores(logprobs[:, None], np.empty((len(logprobs), 0), TOKEN))

    async def watch(self, beat: float) -> None:
        """As `Engine.watch`."""
        await self._engine.watch(beat)

    async def close(self) -> None:
        """End vLLM's processes."""
        await self._engine.close()
