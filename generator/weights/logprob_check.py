"""Checks after updates of the weights that the engine's log-probs agree with the learner's."""

from __future__ import annotations

from typing import Any

import numpy as np

from common.config import Config
from common.errors import UserError
from common.weights.wire import Manifest
from generator.engine.engine import Engine

# Mean |difference| of log-probs that rounding can explain, by the type both sides compute in.
FLOAT32_TOLERANCE = 0.02
BFLOAT16_TOLERANCE = 0.25
AT_FIRST = 3  # updates to trained versions after each of which log-probs are compared


class LogprobCheck:
    """Compares log-probs of a fixed prompt after each of the first updates, then after every `check_every`-th one."""

    def __init__(self, engine: Engine, config: Config, log: Any) -> None:
        self._engine, self._log = engine, log
        self._model, tolerance = config.model.path, config.generator.logprob_tolerance
        if tolerance is None:
            is_float32 = config.model.dtype == config.learner.dtype == "float32"
            tolerance = FLOAT32_TOLERANCE if is_float32 else BFLOAT16_TOLERANCE
        self._tolerance = tolerance
        self._every = config.generator.check_every
        self._trained = 0  # updates to trained versions
        self._agreed = False

    async def after_update(self, manifest: Manifest) -> None:
        """Check the weights that have just been loaded, if it is their turn.

        Raises:
            UserError: the engine's log-probs are not the learner's.
        """
        if not manifest.check_token_ids:
            return
        # Version 0 is what the engine started with, so it proves nothing about the transfer.
        self._trained += manifest.version > 0
        if self._trained > AT_FIRST and self._trained % self._every:
            return
        try:
            logprobs = await self._engine.logprobs(manifest.check_token_ids)
        except ValueError as error:  # some engine arguments rule out log-probs of prompts
            self._log.warning("log-probs cannot be compared with the learner's", reason=str(error))
            return
        difference = float(np.abs(logprobs[1:] - np.asarray(manifest.check_logprobs)).mean())
        if not difference <= self._tolerance:  # NaN fails too
            kernels = ", ".join(await self._engine.expert_kernels())
            experts = f"vLLM's kernels for experts ({kernels}) do not take new weights, " if kernels else ""
            diverged = "training diverges (an earlier version agreed; lower learner.lr), " if self._agreed else ""
            raise UserError(
                f"after the update to version {manifest.version}, log-probs of the engine differ by {difference:.3g} "
                f"from the learner's on average (generator.logprob_tolerance = {self._tolerance:g}): {diverged}not all "
                f"weights have arrived, {experts}vLLM computes {self._model} differently from transformers, "
                "or generator.engine quantises it; compare the two on one prompt, or raise the tolerance if the "
                "difference is intended"
            )
        log = self._log.debug if self._agreed and self._trained > 1 else self._log.info
        self._agreed = True
        log("log-probs agree with the learner's", version=manifest.version, difference=difference)
