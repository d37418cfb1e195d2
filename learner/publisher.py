"""A thread in which a version is served and announced while the next batch is trained on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Publisher:
    """Does one thing after another; what fails in the thread is raised where its end is asked for."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "publish")
        self._under_way: Future[None] | None = None

    def submit(self, act: Callable[[], None]) -> None:
        """Begin something, once what was begun before is done."""
        self.wait()
        self._under_way = self._thread.submit(act)

    def wait(self) -> None:
        """Return when nothing is under way; raises what that raised, once."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    @property
    def is_busy(self) -> bool:
        """Whether something is under way."""
        return self._under_way is not None and not self._under_way.done()

    def check(self) -> None:
        """Raise what has failed, if anything has; waits for nothing."""
        if self._under_way is not None and self._under_way.done():
            self.wait()

    def close(self) -> None:
        """Wait, whatever comes of it."""
        self._thread.shutdown()
