"""D: how far the policy moved on a prompt since the policy that last answered it."""

from __future__ import annotations

import numpy as np

from common.config import DriftConfig

NEVER = -1


class PromptDrift:
    """Gives each counted response its drift D, by one of three modes.

    `rescore`: the generator scores the prompt's previous response under its current weights, and sends D in the
    header. `ledger`: the learner's drift per version is summed from the newest version of the previous response to
    the newest of this one. `constant`: D is 0 and `rho` is used as it is.
    """

    def __init__(self, config: DriftConfig, num_prompts: int) -> None:
        self.config = config
        self.answered = np.full(num_prompts, NEVER, np.int64)  # newest version that answered each prompt, [N]
        self._cumulative = [0.0]  # sum of drift from version 0 to each version

    @property
    def rho(self) -> float | None:
        """The fixed forgetting factor of mode `constant`."""
        return self.config.rho if self.config.mode == "constant" else None

    def record(self, version: int, drift: float) -> bool:
        """Note a step's drift; False if the version was noted before (the learner replays steps after a crash)."""
        if version < len(self._cumulative):
            return False
        total = self._cumulative[-1]
        # A learner that resumes from a checkpoint starts at a version whose past was not measured.
        self._cumulative += [total] * (version - len(self._cumulative)) + [total + drift]
        return True

    def measure(self, i: int, rescored: float | None, newest_version: int) -> float:
        """D of a response to the prompt at index i; the response becomes the prompt's previous one.

        Args:
            rescored: D as the generator measured it; None at the first visit.
            newest_version: of the response.
        """
        last = self.answered.item(i)
        self.answered[i] = max(last, newest_version)
        if self.config.mode == "constant" or last == NEVER:
            return 0.0
        if self.config.mode == "rescore":
            return rescored or 0.0
        return max(0.0, self.cumulative(newest_version) - self.cumulative(last))

    def cumulative(self, version: int) -> float:
        """Drift summed from version 0 to a version, or to the newest known."""
        return self._cumulative[min(version, len(self._cumulative) - 1)]

    def by_version(self) -> np.ndarray:
        """`cumulative` of every version so far, float64 [V]."""
        return np.array(self._cumulative)

    def restore(self, cumulative: np.ndarray) -> None:
        """Restore the state that `by_version` returned."""
        self._cumulative = cumulative.tolist()
