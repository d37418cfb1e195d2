"""Ends a generator whose reward fails for task after task: only its author can fix that."""

from __future__ import annotations

import asyncio
import re
from typing import NoReturn

from common.errors import UserError

IN_A_ROW = 10  # tasks
_PLACE = re.compile(r"\(\S+:\d+\)$")  # at the end of an error that came from a user's code


class RewardFailures:
    """Counts tasks whose reward failed in their first attempt, with none scored between them.

    Only first attempts count: at the end of an evaluation only the few tasks that always fail are left, and retries of
    these would reach the limit.
    """

    def __init__(self) -> None:
        self._in_a_row = 0
        self._last: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._places: set[str] = set()

    def failed(self, error: Exception, attempt: int) -> None:
        self._in_a_row += attempt == 1
        if self._in_a_row >= IN_A_ROW and not self._last.done():
            self._last.set_result(str(error))

    def scored(self) -> None:
        self._in_a_row = 0

    def was_named(self, reason: str) -> bool:
        """Whether an error from the same file and line was passed here before."""
        place = _PLACE.search(reason)
        if place is None or place[0] in self._places:
            return place is not None
        self._places.add(place[0])
        return False

    async def end(self) -> NoReturn:
        """Wait until the limit is reached, then raise `UserError`."""
        raise UserError(
            f"{await self._last}; the reward failed for {IN_A_ROW} tasks in a row, and none was scored between them: "
            "fix it and start again, the run continues where it stopped"
        )
