"""The sampler's own timeline: what its rounds wait for, and its evaluations."""

from __future__ import annotations

import time
from pathlib import Path

from common.log import Timeline

GAP = 0.1  # seconds between two waits that are shown as one
SHOWN = 0.1  # seconds of a wait that are worth a slice


class SamplerTimeline(Timeline):
    """Rounds wait for milliseconds, again and again: waits for the same follow one another as one slice."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "sampler")
        self._wait = ("", 0.0, 0.0)  # for whom, from when, until when
        self._evaluation = ("", 0.0)  # name, since when

    def waited(self, cause: str, seconds: float) -> None:
        """A round has waited until now."""
        now = time.time()
        before, start, end = self._wait
        if before == cause and now - seconds - end < GAP:
            self._wait = (cause, start, now)
            return
        self.flush()
        self._wait = (cause, now - seconds, now)

    def evaluating(self, evaluation: str) -> None:
        """The evaluation that is under way now, or "" for none."""
        name, since = self._evaluation
        if name != evaluation:
            if name:
                self.slice(f"evaluation {name}", since, lane="evaluations")
            self._evaluation = (evaluation, time.time())

    def flush(self) -> None:
        """Write the wait that may go on."""
        cause, start, end = self._wait
        if end - start > SHOWN:
            self.slice(f"waits for {cause}", start, end, lane="waiting")
        self._wait = ("", 0.0, 0.0)
