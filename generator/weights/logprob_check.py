"""Checks after the first updates that the engine's log-probs agree with the learner's."""

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


class LogprobCheck:
    """Compares log-probs of a fixed prompt after the first update, and after the first update to a trained version."""

    def __init__(self, engine: Engine, config: Config, log: Any) -> None:
        self._engine, self._log = engine, log
        self._model, tolerance = config.model.path, config.generator.logprob_tolerance
        if tolerance is None:
            is_float32 = config.model.dtype == config.learner.dtype == "float32"
            tolerance = FLOAT32_TOLERANCE if is_float32 else BFLOAT16_TOLERANCE
        self._tolerance = tolerance
        self._is_done = self._agreed = False

    async def after_update(self, manifest: Manifest) -> None:
        """Check the weights that have just been loaded, unless enough versions have been checked.

        Raises:
            UserError: the engine's log-probs are not the learner's.
        """
        if self._is_done or not manifest.check_token_ids:
            return
        # Version 0 is what the engine started with, so it proves nothing about the transfer.
        self._is_done = manifest.version > 0
        try:
            logprobs = await self._engine.logprobs(manifest.check_token_ids)
        except ValueError as error:  # some engine arguments rule out log-probs of prompts
            self._log.warning("log-probs cannot be compared with the learner's", reason=str(error))
            return
        difference = float(np.abs(logprobs[1:] - np.asarray(manifest.check_logprobs)).mean())
        if not difference <= self._tolerance:  # NaN fails too
            diverged = "training diverges (an earlier version agreed; lower learner.lr), " if self._agreed else ""
            raise UserError(
                f"after the update to version {manifest.version}, log-probs of the engine differ by {difference:.3g} "
                f"from the learner's on average (generator.logprob_tolerance = {self._tolerance:g}): {diverged}not all "
                f"weights have arrived, vLLM computes {self._model} differently from transformers, or generator.engine "
                "quantises it; compare the two on one prompt, or raise the tolerance if the difference is intended"
            )
        self._agreed = True
        self._log.info("log-probs agree with the learner's", version=manifest.version, difference=difference)
