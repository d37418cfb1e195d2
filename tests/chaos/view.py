"""Does the faults while the run is shown, since a view is called several times a second."""

from __future__ import annotations

from collections.abc import Callable

from launcher.audit.records import RedisRecords, read_redis
from launcher.run.display import View
from launcher.run.local_run import workers
from launcher.run.progress import PhaseTimer, Progress
from launcher.run.supervisor import Supervisor
from tests.chaos.injector import Injector


class ChaoticView:
    """Shows a run by another view, and does it harm from its first step on.

    Attributes:
        records: what the run left in Redis; None while it goes on.

    Args:
        remaining: says for how many seconds more there are faults.
    """

    def __init__(
        self, view: View, make_injector: Callable[[Supervisor], Injector], remaining: Callable[[], float]
    ) -> None:
        self.records: RedisRecords | None = None
        self._progress: Progress | None = None
        self._injector: Injector | None = None
        self._view, self._make_injector, self._remaining = view, make_injector, remaining

    def update(self, progress: Progress, supervisor: Supervisor, phases: PhaseTimer) -> None:
        self._progress = progress
        if progress.finished:
            self._calm()
            if self.records is None and not workers(supervisor):
                self.records = read_redis(progress.broker)
        elif self._injector is None:
            if progress.version >= 1:
                self._injector = self._make_injector(supervisor)
        elif self._remaining() > 0:
            self._injector.poll()
        else:
            self._calm()
        self._view.update(progress, supervisor, phases)

    def close(self) -> None:
        """Leave nothing frozen behind. A process that is still starting may not have left a run that is over."""
        self._calm()
        if self._progress is not None and self._progress.finished and self.records is None:
            self.records = read_redis(self._progress.broker)
        self._view.close()

    def _calm(self) -> None:
        if self._injector is not None:
            self._injector.heal()
