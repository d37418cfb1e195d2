"""Patience with machinery that fails: some tasks set aside are to be borne, nothing but such tasks is not."""

from __future__ import annotations

from common.config import SamplerConfig
from common.errors import UserError
from common.messages import SampleHeader

LEAST = 64  # tasks


class Patience:
    """Counts tasks set aside in a row. An answer restores it; prompts that are to blame themselves do not count.

    What is counted is in the order of arrival, and as many tasks as are outstanding may hang at the same time while all
    others have been answered: only more than that say that nothing is answered any more.
    """

    def __init__(self, config: SamplerConfig) -> None:
        outstanding = (config.max_staleness + 1) * config.batch_size
        self.limit = config.max_set_aside or max(LEAST, outstanding)
        self.in_a_row = 0
        self._reason = ""

    def saw(self, header: SampleHeader) -> None:
        """A task of this run has come back."""
        if header.status == "ok":
            self.in_a_row = 0
        elif not header.retire:
            self.in_a_row += 1
            self._reason = header.reason

    def check(self) -> None:
        """Raise `UserError` when it has run out."""
        if self.in_a_row > self.limit:
            raise UserError(
                f"{self.in_a_row} tasks in a row were set aside, and none was answered between them "
                f"(sampler.max_set_aside = {self.limit}); the last one: {self._reason}; mend that and start again, the "
                "run goes on where it is"
            )
