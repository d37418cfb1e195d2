"""Tasks: the seed of each, and the search for those that are in no stream any more."""

from __future__ import annotations

import time
import zlib
from collections.abc import Collection

from common.config import RunConfig
from common.streams.ledger import SamplerLedger

EVERY = 30.0  # seconds between the end of a search and the next one
SLICE = 512  # entries read in a round


class LostTasks:
    """Reads the streams slice by slice, while the run goes on.

    A task in flight moves only forward: to the end of its stream when it is given back, on to `samples` when it is
    finished, and out of there by the sampler's own commit. So a search that reads the streams in this order passes
    every task that exists. No step of the protocol loses one; a restored Redis or a hand that deletes entries does. A
    fail-over in the middle of a search can move one back, so that only what two searches miss is lost.

    Attributes:
        ids: tasks that the last two searches did not come across.
    """

    def __init__(self, ledger: SamplerLedger) -> None:
        self.ids: list[str] = []
        self._ledger = ledger
        self._unseen: set[str] = set()
        self._missed: set[str] = set()  # by the search before
        self._streams: list[str] = []  # still to be read; the first one from `_after` on
        self._after = ""
        self._due = time.monotonic() + EVERY

    def search(self, in_flight: Collection[str], evaluation: str = "") -> None:
        """Go on by one slice.

        Args:
            in_flight: tasks, all of which have been sent; what is not committed yet is nowhere.
            evaluation: name of the one that is under way.
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


def task_seed(run: RunConfig, name: str) -> int | None:
    """A task's seed, by its name; None but in a deterministic run, since vLLM samples more slowly with seeds."""
    return zlib.crc32(f"{run.seed} {name}".encode()) if run.deterministic else None
