"""The watch over Redis's memory."""

from __future__ import annotations

import math
import time
from typing import Any

from common.streams.broker import Broker

INTERVAL = 0.1  # seconds between checks of Redis' memory
LOG_INTERVAL = 30.0


class MemoryWatch:
    """Tells whether Redis is so full that no task may be sent until the learner has freed memory."""

    def __init__(self, broker: Broker, log: Any) -> None:
        self.was_short = False  # at the last check
        self._broker, self._log = broker, log
        self._read_at = self._logged_at = -math.inf

    def is_short(self) -> bool:
        now = time.monotonic()
        if now - self._read_at < INTERVAL:
            return self.was_short
        self._read_at, before, self.was_short = now, self.was_short, self._broker.memory_is_short()
        if self.was_short and now - self._logged_at > LOG_INTERVAL:
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
