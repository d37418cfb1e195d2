"""A sampler's run in memory: Redis's part is played by plain dictionaries, so that thousands of rounds take seconds."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import structlog

from common.config import Config
from common.messages import Batch, SampleHeader, Step, Task
from common.streams.lease import LedgerState
from common.streams.ledger import Commit
from sampler.files.metrics_file import Entry
from sampler.loop import Sampler
from sampler.prompts.prompt_set import load_data


class MemoryRun:
    """Tasks and batches out, headers and steps in; a commit is applied as commit.lua applies it."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.data = load_data(config.data, structlog.get_logger())
        self.state = LedgerState({}, {}, {}, {})
        self.tasks: dict[str, Task] = {}  # waiting for an answer
        self.headers: dict[str, SampleHeader] = {}  # not yet counted, by entry id
        self.answered: dict[str, SampleHeader] = {}  # by task id
        self.payloads: set[str] = set()
        self.batches: list[Batch] = []
        self.steps: list[Step] = []
        self.counters: Counter[str] = Counter()
        self.metrics: dict[int, dict[str, float]] = {}  # by version
        self.broker: Any = SimpleNamespace(dead_after=1e9, memory_is_short=lambda: False)

    def acquire(self) -> LedgerState:
        state = self.state
        return LedgerState(dict(state.tracker), dict(state.open), dict(state.outstanding), dict(state.scalars))

    def read(self, count: int, block_ms: int) -> list[tuple[str, SampleHeader]]:
        return list(self.headers.items())[:count]

    def arrived(self) -> int:
        return len(self.headers)

    def commit(self, commit: Commit) -> int:
        for entry_id in commit.counted:
            del self.headers[entry_id]
        self.state.tracker |= commit.tracker
        self.state.open |= commit.open_add
        for sample_id in commit.open_remove:
            del self.state.open[sample_id]
        for task_id in commit.outstanding_remove:
            del self.state.outstanding[task_id]
        for task, dispatched in commit.dispatch:
            self.state.outstanding[task.task_id] = dispatched
            self.tasks[task.task_id] = task
        self.batches += commit.batches
        self.payloads -= set(commit.unlink)
        self.counters.update(commit.counters)
        for name, value in commit.scalars.items():
            self.state.scalars[name] = value if isinstance(value, bytes) else str(value).encode()
        return len(commit.counted)

    def renew(self) -> None: ...

    def answer(self, task_id: str, **values: Any) -> None:
        """A generator's answer, or a skipped task if `values` say so."""
        task = self.tasks.pop(task_id)
        header = SampleHeader(task_id=task_id, prompt_id=task.prompt_id, tokens=9, model_tokens=5, **values)
        self.headers[f"{len(self.answered)}-0"] = self.answered[task_id] = header
        if header.status == "ok":
            self.payloads.add(task_id)

    def train(self) -> None:
        """The learner's next step, on the oldest batch it has not trained on."""
        batch = self.batches[len(self.steps) - 1]
        self.payloads -= set(batch.sample_ids)
        self.steps.append(Step(version=len(self.steps)))

    def sampler(self) -> Sampler:
        """A new process, which takes over where the last commit left the run."""
        run: Any = self
        presence: Any = SimpleNamespace(status=lambda **_: None)
        sampler = Sampler(self.config, self.data, run, presence, structlog.get_logger())
        feeds: Any = lambda *_: SimpleNamespace(wake=lambda: None, discard=lambda version: None)  # noqa: E731
        with patch.multiple("sampler.metrics", MetricsFile=lambda *_: MemoryMetrics(self), TrackerFeed=feeds):
            sampler.begin()
        sampler.steps = MemorySteps(self, int(sampler.state.last_step))  # type: ignore[assignment]
        return sampler


class MemoryMetrics:
    def __init__(self, run: MemoryRun) -> None:
        self.run = run

    path = None

    def append(self, entries: list[Entry]) -> None:
        for entry in entries:
            self.run.metrics.setdefault(entry.version, {}).update(entry.values)

    def discard(self, version: int) -> None: ...


class MemorySteps:
    def __init__(self, run: MemoryRun, seen: int) -> None:
        self.run, self.seen = run, seen

    @property
    def last(self) -> str:
        return str(self.seen)

    def read(self, block_ms: int = 0) -> list[Step]:
        new = self.run.steps[self.seen :]
        self.seen += len(new)
        return new
