"""Everything that a report needs of a run folder, read once: whatever is missing there is missing here."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redis.exceptions import RedisError

from common.config import Config, load_config
from common.errors import UserError
from common.messages import InvalidMessage
from common.streams import dead
from common.unpack import Unreadable
from launcher.folder.metrics import Metrics, read_metrics
from launcher.folder.processes import is_locked
from launcher.folder.run_folder import RunFolder, find_runs
from launcher.folder.version_table import recorded_versions
from launcher.report.evaluations import Evaluation, Improvement, improvement, read_evaluations
from launcher.report.settings import settings
from launcher.run.reopened import reopened


@dataclass(frozen=True, slots=True)
class Queue:
    """What only the run's Redis knows.

    Attributes:
        letters: reasons of the newest dead letters, and how many there are of each.
        note: why it could not be read; empty if it could.
    """

    counters: dict[str, int] = field(default_factory=dict)
    letters: Counter[str] = field(default_factory=Counter)
    finished: bool = False
    processes: int = 0
    note: str = ""


@dataclass(frozen=True, slots=True)
class RunData:
    """One run.

    Attributes:
        values: the configuration by key; paths in the run folder begin with `RUN`.
        summary: of its newest start, if that has come to an end; else empty.
        counters: the run's, as far as they are known.
        changes: of the configuration, oldest first.
        versions: what each process that joined runs with, in order.
        audit: `spo chaos`' lines, if it was one of its runs.
        notes: what is there and could not be read.
    """

    folder: Path
    name: str
    values: dict[str, Any]
    summary: dict[str, Any]
    counters: dict[str, int]
    changes: list[dict[str, Any]]
    versions: list[dict[str, Any]]
    audit: list[dict[str, str]]
    metrics: Metrics
    evaluations: list[Evaluation]
    queue: Queue
    is_used: bool
    notes: list[str]

    @property
    def full_reward(self) -> float:
        """The reward of a right answer."""
        try:
            return float(self.values["sampler.tracker.reward_range"][1])
        except (KeyError, TypeError, ValueError, IndexError):
            return 1.0

    @property
    def step(self) -> int:
        """The newest version of the weights that is known of."""
        evaluated = [evaluation.version for evaluation in self.evaluations]
        return max([_whole(self.summary.get("steps")), _trained(self.metrics), *evaluated])

    @property
    def state(self) -> str:
        """Finished, going on, or how far it came, in words."""
        steps = self.values.get("run.steps")
        has_finished = bool(self.summary.get("finished")) or self.queue.finished
        # One that is given more steps begins again where it had finished.
        if has_finished and (not isinstance(steps, int) or self.step >= steps):
            return "finished"
        if self.is_used or self.queue.processes:
            return f"going on, at step {self.step} of {steps}"
        return f"not finished: stopped at step {self.step} of {steps}"

    @property
    def is_over(self) -> bool:
        """Whether it has come to its end."""
        return self.state == "finished"

    def improvement(self) -> Improvement | None:
        """What training changed on the held-out prompts; None where that is not known."""
        return improvement(self.evaluations, self.full_reward)


def read_run(path: Path, *, ask_redis: bool = True) -> RunData:
    """Everything about a run, finished or not.

    Args:
        path: the run's folder, or the config.yaml in it.
        ask_redis: for what only Redis knows, if a summary does not say that there is nothing more to know.

    Raises:
        UserError: it is no run folder, or holds several.
    """
    runs = find_runs([path])
    if len(runs) > 1:
        raise UserError(f"{path} holds {len(runs)} runs: name one of them, such as {path / runs[0].path.name}")
    return read_folder(runs[0], ask_redis=ask_redis)


def read_folder(run: RunFolder, *, ask_redis: bool) -> RunData:
    """The same of a folder that is known to be a run's."""
    notes: list[str] = []
    config, metrics, is_used = run.config(), read_metrics(run.path), is_locked(run.path)
    if not config:
        notes.append("its config.yaml is missing or cannot be read")
    if metrics.note:
        notes.append(metrics.note)
    if metrics.unreadable:
        notes.append(f"{metrics.unreadable} lines of metrics.jsonl could not be read")
    versions, unreadable = recorded_versions(run.path)
    if unreadable:
        notes.append(f"{unreadable} lines of versions.jsonl could not be read")
    summary = run.summary()
    if is_used or _trained(metrics) > _whole(summary.get("steps")):
        summary = {}  # of an earlier start: the run has gone on since
    counters = run.books(metrics)
    queue = (
        _queue(run.path)
        if ask_redis and config and not (summary.get("finished") and not counters.get("dead"))
        else Queue()
    )
    return RunData(
        folder=run.path,
        name=run.name,
        values=settings(config, run.path),
        summary=summary,
        counters=queue.counters or counters,
        changes=run.changes(),
        versions=versions,
        audit=_audit(run.path),
        metrics=metrics,
        evaluations=read_evaluations(run.path),
        queue=queue,
        is_used=is_used,
        notes=notes + ([queue.note] if queue.note else []),
    )


def _trained(metrics: Metrics) -> int:
    """The newest version that the learner has made and measured; 0 before the first."""
    return int(max(metrics.series("seconds/train", "learner").versions, default=0))


def _whole(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _audit(folder: Path) -> list[dict[str, str]]:
    try:
        checks = json.loads((folder / "chaos.json").read_text(encoding="utf-8"))["checks"]
    except (OSError, ValueError, LookupError, TypeError):
        return []
    return [check for check in checks if isinstance(check, dict)] if isinstance(checks, list) else []


def _queue(folder: Path) -> Queue:
    try:
        with reopened(_at_home(load_config(folder / "config.yaml"), folder.absolute())) as broker:
            letters = Counter(str(note.get("reason", "")) for _, note in dead.list_dead(broker, dead.MAX_LETTERS))
            return Queue(broker.counters(), letters, broker.finished(), len(broker.processes()))
    except (UserError, RedisError, OSError, Unreadable, InvalidMessage, LookupError, ValueError) as error:
        return Queue(note=f"its Redis was not read: {error}")


def _at_home(config: Config, folder: Path) -> Config:
    """The configuration of a run whose folder may have been moved or copied: another run may be where it was."""
    url = config.broker.url.replace(str(config.run.folder.absolute()), str(folder))
    run = config.run.model_copy(update={"output_dir": str(folder.parent), "experiment": folder.name})
    return config.model_copy(update={"run": run, "broker": config.broker.model_copy(update={"url": url})})
