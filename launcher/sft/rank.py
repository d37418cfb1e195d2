"""Supervised training in this process, alone or as one of several ranks (`python -m launcher.sft.rank`)."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from common import log as logs
from common.config import Config, load_config
from common.process import keep_files_private, leaving_no_trace
from common.scripts import entry_point
from launcher.model_card import held_out
from learner.batch.demonstrations import Demonstrations, folder_of
from learner.ranks.launch import die_with_launcher
from learner.ranks.rank import exits_at_once
from sampler.files.metrics_file import Entry, MetricsFile
from sampler.trackers.feed import TrackerFeed

Progress = Callable[[int, int, float], None]  # step, steps, loss
UNFINISHED = 3  # exit code if a signal ended it


@leaving_no_trace()
def train_here(config: Config, log: Any, progress: Progress | None = None, until: int | None = None) -> bool:
    """Train on the demonstrations in the run folder, from the newest checkpoint on.

    SIGTERM and SIGINT end it after a checkpoint. Returns whether it reached step `until`, by default the last one.

    Args:
        config: see `supervised` and `with_steps`.
        progress: called on rank 0 after each step.

    Raises:
        UserError: the model, a checkpoint or the demonstrations cannot be loaded, or training diverges.
    """
    # torch and DeepSpeed take seconds to import, so they wait until the configuration has been checked.
    from learner.policy.kernels import deterministic
    from learner.ranks import world as ranks
    from learner.supervised import SupervisedLearner

    world = ranks.start(config.learner.rank_timeout).in_groups(config.learner.sequence_parallel)
    heldout = folder_of(config, "heldout")
    metrics = StepMetrics(config, log, progress)
    try:
        with deterministic(config.run.seed) if config.run.deterministic else nullcontext():
            learner = SupervisedLearner(
                config,
                world,
                Demonstrations.open(folder_of(config, "train")),
                Demonstrations.open(heldout) if heldout.exists() else None,
                metrics.add,
                log,
                partial(held_out, config.run.folder),
            )
            if world.is_main:
                metrics.open(learner.version)
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: learner.stop.set())
            return learner.run(until)
    finally:
        metrics.close()
        if world.size > 1:  # a single rank may train again in this process, and DeepSpeed keeps its group
            ranks.stop()


class StepMetrics:
    """Writes each step's metrics to `metrics.jsonl`, and sends them to the trackers of `run.log_to`."""

    def __init__(self, config: Config, log: Any, progress: Progress | None = None) -> None:
        self._config, self._log, self._progress = config, log, progress
        self._file: MetricsFile | None = None
        self._feeds: list[TrackerFeed] = []
        self._version = 0

    def open(self, version: int) -> None:
        """Begin after this step; metrics of later steps, which will be written again, are removed.

        At step 0 nothing is removed: `prepare` has removed old metrics, and those of step 0's evaluation must stay.
        """
        run = self._config.run
        self._file, self._version = MetricsFile(run.folder, self._log, run.metrics_bytes), version
        self._feeds = [
            TrackerFeed(name, self._config, self._file.path, self._log) for name in dict.fromkeys(run.log_to)
        ]
        if version > 0:
            removed = self._file.discard(version)
            for feed in self._feeds:
                feed.discard(version, removed)

    def evaluated(self, version: int, figures: dict[str, float]) -> None:
        """Write the figures of a held-out evaluation, under the names that they have in a run."""
        self._write(Entry(version, "sampler", {f"validation/{name}": value for name, value in figures.items()}))

    def add(self, version: int, metrics: dict[str, float]) -> None:
        self._write(Entry(version, "learner", metrics))
        steps = self._config.run.steps
        losses = {name: metrics[f"sft/{name}"] for name in ("loss", "heldout_loss") if f"sft/{name}" in metrics}
        if self._progress is not None and "loss" in losses:
            self._progress(version, steps, losses["loss"])
        if self._progress is None or "heldout_loss" in losses:
            self._log.info("step", step=f"{version}/{steps}", **losses)

    def close(self) -> None:
        for feed in self._feeds:
            feed.stop(self._version >= self._config.run.steps)
        for feed in self._feeds:
            feed.join()

    def _write(self, entry: Entry) -> None:
        assert self._file is not None
        self._version = max(self._version, entry.version)
        is_full = self._file.append([entry])
        for feed in self._feeds:
            if is_full:
                feed.begin_new_file()
            feed.wake()


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def rank(
    config: Annotated[Path, typer.Option("--config", "-c", help="The run folder's config.yaml.")],
    until: Annotated[int | None, typer.Option(min=1, help="Step to end at; by default the last.")] = None,
) -> None:
    """One rank of supervised training."""
    keep_files_private()
    die_with_launcher()
    if not train_here(load_config(config, environ={}), logs.setup("learner"), until=until):
        raise SystemExit(UNFINISHED)


main = exits_at_once(entry_point(app))

if __name__ == "__main__":
    main()
