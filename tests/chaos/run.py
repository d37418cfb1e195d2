"""One run under faults, and the audit of what it left."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import redis

from common.config import Config
from common.errors import UserError
from common.streams.broker import Broker
from launcher.audit.lines import AuditLine, audit, figures
from launcher.audit.records import RedisRecords, read_redis
from launcher.layout.layout import Choice
from launcher.run.display import View
from launcher.run.local_run import RunOptions, run_here, workers
from launcher.run.processes import command, secret_environment, thread_limits, with_url
from launcher.run.progress import PhaseTimer, Progress
from launcher.run.summary import Summary
from launcher.run.supervisor import Supervisor
from tests.chaos.disk import Disk
from tests.chaos.injector import Blackout, Injector, Tally
from tests.chaos.proxy import Proxy
from tests.chaos.schedule import Fault

HARDY = 1_000_000  # restarts of a process


class ChaoticRun:
    """Runs, and does the faults in the run's view, which is called several times a second.

    Attributes:
        records: what the run left in Redis; None while it is running.
    """

    def __init__(self, config: Config, faults: Iterator[Fault], seconds: float, log: Any) -> None:
        self.config, self.log = config, log
        self.tally = Tally()
        self.records: RedisRecords | None = None
        self._seconds, self._ends = seconds, math.inf
        self._faults = faults
        self._drawn = random.Random(f"power {config.run.seed}")
        self._disk = Disk(config.run.folder)
        self._proxy: Proxy | None = None
        self._broker: Broker | None = None
        self._view: View | None = None
        self._progress: Progress | None = None
        self._injector: Injector | None = None
        self._generators = 1  # started so far

    def run(self, view: Callable[[], View], phases: PhaseTimer) -> Summary:
        """Start the run, do the faults, and wait until it ends; raises what `run_here` raises."""
        self._disk.note_syncs()
        while True:
            full = self.tally.done["disk full"]
            try:
                return self._run(view, phases)
            except Blackout:
                lost = self._disk.lose(self._drawn)
                self.log.warning("the run continues after a power cut", bytes_lost=lost)
            except UserError as error:
                if self.tally.done["disk full"] == full:
                    raise
                self.log.warning("the run ended because its disk was full; it continues", error=str(error))

    def audit(self) -> list[AuditLine]:
        assert self.records is not None, "the run is over"
        return audit(self.config, self.records, self.log)

    def update(self, progress: Progress, supervisor: Supervisor, phases: PhaseTimer) -> None:
        """Do the faults that are due, from the run's first step on, and show it."""
        assert self._view is not None
        self._progress = progress
        if progress.finished:
            self._heal()
            if self.records is None and not workers(supervisor):
                self.records = read_redis(progress.broker)
        elif self._injector is None:
            if progress.version >= 1:
                self._injector = self._injector_of(supervisor)
        elif time.monotonic() < self._ends:
            self._injector.poll()
        else:
            self._heal()
        self._view.update(progress, supervisor, phases)

    def close(self) -> None:
        """Leave nothing frozen behind. A process that is still starting may not have left a run that is over."""
        assert self._view is not None
        self._heal()
        if self._progress is not None and self._progress.finished and self.records is None:
            self.records = read_redis(self._progress.broker)
        self._view.close()

    def _heal(self) -> None:
        if self._injector is not None:
            self._injector.heal()

    def _run(self, view: Callable[[], View], phases: PhaseTimer) -> Summary:
        if self._injector is not None:  # the fault that it had not done yet comes first
            self._faults = chain([self._injector.next], self._faults)
        self._injector = self._progress = self.records = None

        def open_view() -> View:
            self._view = view()
            return self

        try:
            options = RunOptions(Choice(1), max_restarts=HARDY, front=self._stand_before)
            return run_here(self.config, options, open_view, self.log, phases)
        finally:
            if self._proxy is not None:
                self._proxy.close()
            if self._broker is not None:
                self._broker.redis.close()
            self._proxy, self._broker = None, None

    def _stand_before(self, url: str) -> str:
        self._proxy = Proxy(url, self.config.run.folder / "redis")
        client = redis.Redis.from_url(url, socket_timeout=5)
        self._broker = Broker(client, self.config.run.name, self.config.broker.dead_after)
        return self._proxy.url

    def _injector_of(self, supervisor: Supervisor) -> Injector:
        proxy, broker = self._proxy, self._broker
        assert proxy is not None
        assert broker is not None
        self._ends = min(self._ends, time.monotonic() + self._seconds)

        def start_one() -> None:
            self._generators += 1
            name = f"generator-{self._generators}"
            arguments = command("generator.cli", self.config.run.folder / "config.yaml", "--name", name)
            environment = secret_environment(with_url(self.config, proxy.url))
            supervisor.start(name, arguments, environment | thread_limits(name, 3))

        return Injector(
            self._faults, self.tally, proxy, broker, self.config.run.folder / "redis", self._disk,
            supervisor, start_one, self.log,
        )  # fmt: skip


def write(path: Path, run: ChaoticRun, checks: list[AuditLine], result: Summary) -> None:
    assert run.records is not None
    content = {
        "seed": run.config.run.seed, "faults": dict(run.tally.done), "skipped": dict(run.tally.skipped),
        "figures": figures(run.records), "checks": [asdict(check) for check in checks],
        "accuracy": result.accuracy_after, "restarts": result.restarts, "seconds": result.seconds,
    }  # fmt: skip
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
