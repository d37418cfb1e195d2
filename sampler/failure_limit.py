"""Stops a run in which no task is answered any more."""

from __future__ import annotations

from common.config import SamplerConfig
from common.errors import UserError
from common.messages import SampleHeader

MIN_LIMIT = 64  # tasks


class FailureLimit:
    """Counts the tasks set aside in a row. An answer resets the count; prompts that can never be answered do not count.

    By default as many may fail as can be outstanding: that many may fail at the same moment, after all the others were
    answered.
    """

    def __init__(self, config: SamplerConfig) -> None:
        outstanding = (config.max_staleness + 1) * config.batch_size
        self.limit = config.max_set_aside or max(MIN_LIMIT, outstanding)
        self.in_a_row = 0
        self._reason = ""

    def add(self, header: SampleHeader) -> None:
        """A task of this run has come back."""
        if header.status == "ok":
            self.in_a_row = 0
        elif not header.retire:
            self.in_a_row += 1
            self._reason = header.reason

    def check(self) -> None:
        """Raise `UserError` above the limit."""
        if self.in_a_row > self.limit:
            raise UserError(
                f"{self.in_a_row} tasks in a row were set aside, and none was answered between them "
                f"(sampler.max_set_aside = {self.limit}); the last one: {self._reason}; fix that and start again, the "
                "run goes on where it stopped"
            )
