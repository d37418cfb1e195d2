"""The search for tasks that Redis has lost."""

from __future__ import annotations

import time
from collections.abc import Collection

from common.streams.ledger import SamplerLedger

EVERY = 30.0  # seconds between the end of a search and the next one
SLICE = 512  # entries read in a round


class LostTasks:
    """Searches the streams for the tasks in flight, slice by slice while the run continues.

    A task in flight moves only forward: to the end of its stream when it is given back, to `samples` when it is
    finished, and out of there by the sampler's own commit. So a search that reads the streams in this order finds every
    task that exists. The protocol itself loses no task, but tasks are missing from a Redis that was restored
    from a backup, or in which entries were deleted by hand. A fail-over during a search can move a task back, so only a
    task that two searches miss counts as lost.

    Attributes:
        ids: tasks that the last two searches did not find.
    """

    def __init__(self, ledger: SamplerLedger) -> None:
        self.ids: list[str] = []
        self._ledger = ledger
        self._unseen: set[str] = set()
        self._missed: set[str] = set()  # by the previous search
        self._streams: list[str] = []  # still to be read, the first one from `_after` on
        self._after = ""
        self._due = time.monotonic() + EVERY

    def search(self, in_flight: Collection[str], evaluation: str = "") -> None:
        """Continue the search by one slice.

        Args:
            in_flight: ids of tasks; all must have been committed, or they would seem lost.
            evaluation: name of the open evaluation, or "".
        """
        self.ids = []
        if not self._streams:
            if time.monotonic() < self._due:
                return
            self._unseen, self._after = set(in_flight), ""
            self._streams = ["tasks", *([f"tasks:{evaluation}"] if evaluation else []), "samples"]
        self._after, ids = self._ledger.task_ids(self._streams[0], self._after, SLICE)
        self._unseen.difference_update(ids)
        if not self._after:
            del self._streams[0]
        if not self._streams:
            self._due = time.monotonic() + EVERY
            self.ids = sorted(self._unseen.intersection(in_flight, self._missed))
            self._missed = self._unseen
