"""A run that was started in this process and is supervised in the background."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

from common.messages import Step
from launcher.run.summary import Summary
from launcher.run.supervisor import INTERRUPTED, EndedEarly, Supervisor

KEPT = 2048  # newest steps that an iteration which is slower than the run can still read


class RunStopped(EndedEarly):
    """The run stopped before its end; `summary` has its figures so far."""

    def __init__(self, reason: str, code: int, summary: Summary) -> None:
        super().__init__(reason, code)
        self.summary = summary


class StepFeed:
    """The metrics of steps, passed from the thread that reads them to any number of iterations."""

    def __init__(self) -> None:
        self._steps: deque[dict[str, float]] = deque(maxlen=KEPT)
        self._added = self._newest = 0
        self._is_closed = False
        self._changed = threading.Condition()

    def add(self, step: Step, after: int = 0) -> None:
        """Add a step's metrics; a step without any, up to version `after`, or that was added before is ignored."""
        with self._changed:
            if step.metrics and step.version > max(after, self._newest):
                self._steps.append({"step": step.version, **step.metrics})
                self._newest, self._added = step.version, self._added + 1
                self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def __iter__(self) -> Iterator[dict[str, float]]:
        """All steps from the first one that is kept, as they come, until the feed is closed."""
        seen, new = self._after(0)
        while new:
            yield from new
            seen, new = self._after(seen)

    def _after(self, seen: int) -> tuple[int, list[dict[str, float]]]:
        """The number of all steps, and those after the first `seen`; waits until there is one, or no more can come."""
        with self._changed:
            self._changed.wait_for(lambda: self._added > seen or self._is_closed)
            return self._added, list(self._steps)[seen - self._added :] if self._added > seen else []


class StartedRun:
    """A run that this process has started: its steps, its end, and its curve in a notebook.

    Iterating yields the metrics of each step as it is trained, a dict with `step` and the names of
    [metrics.md](metrics.md), and ends with the run. Each iteration begins with the first step since this start; one
    that falls more than 2,048 steps behind continues with the oldest step that is kept. If the run fails, the iteration
    raises what `wait` raises.

    The run is supervised in a thread of its own. It continues after an exception or an interrupt in the code that
    started it, and is stopped by `stop`, at the end of a `with` block, or when the interpreter exits. If the
    interpreter is killed, the run's processes are killed.

    Attributes:
        folder: the run folder.
    """

    def __init__(self, folder: Path, supervisor: Supervisor, feed: StepFeed, future: Future[Summary]) -> None:
        self.folder = folder
        self._supervisor, self._feed, self._future = supervisor, feed, future

    def __iter__(self) -> Iterator[dict[str, float]]:
        yield from self._feed
        self.wait()

    def __enter__(self) -> StartedRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        state = "running" if self.running else "over"
        return f"<run in {self.folder}, {state}>"

    def _repr_html_(self) -> str:
        from launcher.recorded import RecordedRun  # imports the page, which a run without a notebook does not need

        return RecordedRun(self.folder).html(self.dashboard)

    @property
    def dashboard(self) -> str:
        """The address of the run's page.

        A thread of this process serves it, to this machine only, until the process ends.
        The address contains a token: anyone with it can read prompts, answers and configuration.
        """
        from launcher.dashboard.background import serve_folder  # imports a web server

        return serve_folder(self.folder)

    @property
    def running(self) -> bool:
        """Whether processes of the run are still there."""
        return not self._future.done()

    def wait(self, timeout: float | None = None) -> Summary:
        """Wait until the run is over.

        Args:
            timeout: seconds to wait at most; None: as long as it takes.

        Returns:
            The run's figures; `finished` is False if it was stopped.

        Raises:
            EndedEarly: the run failed; the message says why.
            UserError: a process refused the configuration.
            TimeoutError: the run is not over after `timeout` seconds. It continues.
        """
        try:
            return self._future.result(timeout)
        except RunStopped as stopped:
            if stopped.code != INTERRUPTED:
                raise
            return stopped.summary

    def stop(self) -> None:
        """Stop all processes, and return once they have ended; does nothing if the run is over.

        Starting the same configuration again continues the run.
        """
        self._supervisor.interrupted.set()
        self._future.exception()  # waits for the end; errors are raised by `wait`, not here
