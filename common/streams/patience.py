"""How long a call waits for a Redis that does not answer: a number of repetitions, unless the process shall end."""

from __future__ import annotations

import time
from typing import Any, Self

from redis.backoff import ExponentialBackoff
from redis.exceptions import ConnectionError

LOOK_EVERY = 0.1


class Patience(ExponentialBackoff):
    """The pauses of a client's retries; none any more once `end` was called.

    Retrying ends by itself only after `broker.wait` seconds and more, and who presses Ctrl-C will not wait for that.
    """

    def __init__(self) -> None:
        super().__init__(cap=1.0, base=0.05)
        self._ended = False

    def end(self) -> None:
        """From now on a call that fails is not repeated. Safe in a signal handler: it takes no lock."""
        self._ended = True

    def compute(self, failures: int) -> float:
        """Wait before a call is repeated for the n-th time; returns 0, how long its caller shall wait.

        Raises:
            ConnectionError: the process shall end.
        """
        until = time.monotonic() + super().compute(failures)
        while not self._ended and (left := until - time.monotonic()) > 0:
            time.sleep(min(LOOK_EVERY, left))
        if self._ended:
            raise ConnectionError("Redis does not answer, and this process was told to stop")
        return 0.0

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # Each connection copies its retries.
        return self
