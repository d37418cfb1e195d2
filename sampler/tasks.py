"""Tasks: the seed of each, the search for those that are in no stream any more, and whether Redis has room for more."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Collection
from typing import Any

from common.config import RunConfig
from common.streams.broker import Broker
from common.streams.ledger import SamplerLedger

EVERY = 30.0  # seconds between the end of a search and the next one
SLICE = 512  # entries read in a round
MEMORY_INTERVAL = 0.1  # seconds for which it is remembered how full Redis is
MEMORY_LOG_INTERVAL = 30.0


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


class MemoryWatch:
    """Watches whether Redis is so full that nothing may be sent before the learner has freed memory."""

    def __init__(self, broker: Broker, log: Any) -> None:
        self.was_short = False  # when it was last read
        self._broker, self._log = broker, log
        self._read_at = self._logged_at = -math.inf

    def is_short(self) -> bool:
        now = time.monotonic()
        if now - self._read_at < MEMORY_INTERVAL:
            return self.was_short
        self._read_at, before, self.was_short = now, self.was_short, self._broker.memory_is_short()
        if self.was_short and now - self._logged_at > MEMORY_LOG_INTERVAL:
            self._logged_at = now
            memory = self._broker.memory()
            self._log.warning(
                "redis is nearly full, no task is sent until the learner has saved and freed memory; if that does not "
                "help, raise maxmemory",
                used=f"{memory.share:.0%} of {memory.limit / 2**20:,.0f} MiB",
            )
        if before and not self.was_short:
            self._log.info("redis has memory again")
        return self.was_short


def task_seed(run: RunConfig, name: str) -> int | None:
    """A task's seed, by its name; None but in a deterministic run, since vLLM samples more slowly with seeds."""
    return zlib.crc32(f"{run.seed} {name}".encode()) if run.deterministic else None
