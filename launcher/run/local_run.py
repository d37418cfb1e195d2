"""Runs everything on this machine, Redis, sampler, learner, generators and teachers, from the start to the summary."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from common.checks.list import check_run
from common.config import Config, differences
from common.config.combinations import check_one_generator
from common.config.load import read_values
from common.errors import UserError
from common.files import checkpoint, checkpoint_versions
from common.held_folder import FolderGone
from common.nvml import GpuReader
from common.process import keep_files_private
from common.streams.agreement import agree, check_changes
from common.streams.broker import Broker
from common.streams.early_stop import EarlyStop, to_continue
from common.streams.steps import latest
from launcher.demonstrations.render import render_for_run
from launcher.layout.gpus import environment
from launcher.layout.layout import NOTHING_ASKED, Choice, Placement, lay_out
from launcher.run.display import View
from launcher.run.folder_lock import locked
from launcher.run.processes import EMBEDDED, connected, in_background, start_all, stopping, with_url, worker_commands
from launcher.run.progress import PhaseTimer, Progress
from launcher.run.started import RunStopped, StartedRun, StepFeed
from launcher.run.summary import Summary, summarize
from launcher.run.supervisor import INTERRUPTED, MAX_RESTARTS, EndedEarly, Supervisor

POLL = 0.1  # seconds
LEAVE_TIMEOUT = 30.0  # seconds that the other processes have to exit by themselves once the learner has exited


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How a run is started on this machine."""

    choice: Choice = NOTHING_ASKED
    redis: str = EMBEDDED  # or the address of a running server
    resume: bool = False  # continue from the run folder if Redis does not know the run
    max_restarts: int = MAX_RESTARTS  # of each process within an hour; after one more failure the run is given up
    front: Callable[[str], str] = str  # maps the address of Redis to the one that the processes use, such as a proxy's
    # Called before anything is started or changed, after processes that a killed command left have ended.
    check: Callable[[Config], None] = check_run


def run_here(config: Config, options: RunOptions, view: Callable[[], View], log: Any, phases: PhaseTimer) -> Summary:
    """Run to the end; raises what `start` raises, and `RunStopped` on Ctrl-C (code 130) or a failure (code 1)."""
    run = start(config, options, view, log, phases)
    try:
        return run.wait()
    except KeyboardInterrupt:
        run.stop()
    summary = run.wait()
    if not summary.finished:
        raise RunStopped("stopped", INTERRUPTED, summary)
    return summary


def start(config: Config, options: RunOptions, view: Callable[[], View], log: Any, phases: PhaseTimer) -> StartedRun:
    """Check the run, then start everything in the background, watch it until the run is over, and stop everything.

    Args:
        view: opens the display once all processes are started.

    Raises:
        UserError: another command works in the run folder, the run cannot be laid out as is asked for, or a check
            fails. If a process refuses its configuration later, the started run raises it.
    """
    check_one_generator(config, options.choice.generators or 1)
    keep_files_private()
    with ExitStack() as stack:
        lock = stack.enter_context(locked(config.run.folder, "run.experiment or run.output_dir"))
        layout = lay_out(config, options.choice)
        options.check(config)
        render_for_run(config, log)
        supervisor = Supervisor(config.run.folder / "logs", log, options.max_restarts, lock=lock)
        # The lock is now the background thread's, which releases it when the run is over.
        feed, held = StepFeed(), stack.pop_all()

    def work() -> Summary:
        with held, closing(feed):
            try:
                return _run(config, options, layout, view, phases, supervisor, feed)
            finally:
                _remove_containers(config, log)

    return StartedRun(config.run.folder, supervisor, feed, in_background(work, supervisor))


def _remove_containers(config: Config, log: Any) -> None:
    """Remove the containers of agents whose generators were killed."""
    if config.uses_containers:
        # Imported here, since the command line starts without what a generator needs.
        from generator.agents.containers.container import remove_all_left

        remove_all_left(log)


def _run(
    config: Config,
    options: RunOptions,
    layout: Placement,
    view: Callable[[], View],
    phases: PhaseTimer,
    supervisor: Supervisor,
    feed: StepFeed,
) -> Summary:
    folder, path = config.run.folder, config.run.folder / "config.yaml"
    progress: Progress | None = None
    ended_early: EndedEarly | UserError | None = None
    try:
        with stopping(supervisor):
            try:
                config, broker = connected(config, options.redis, folder, layout, supervisor)
                _check_folder(config, folder, broker)
                agree(broker, config, supervisor.log)
                # A run whose learner died while it wrote the last checkpoint is started again to write it.
                last = EarlyStop.of(broker).last_version(config.run.steps, config.run.stop_when)
                if broker.finished() and _is_saved(config, last):
                    raise UserError(
                        f"run {config.run.name!r} is finished; {to_continue(broker, config.run)}, or choose another "
                        "run.name and run.experiment"
                    )
                config = with_url(config, options.front(config.broker.url))
                progress = Progress.of(broker, config)
                before = latest(broker)
                progress.on_step = partial(feed.add, after=before.version if before else 0)
                progress.split = layout.split(config.learner.sequence_parallel)
                commands = worker_commands(path, layout)
                if options.resume:
                    commands["learner"].append("--resume")
                if layout.teachers:
                    # Imported here, since the command line starts without what a generator needs.
                    from launcher.run.teacher_servers import start_teachers

                    start_teachers(config, layout, supervisor)
                    gpus = layout.teacher_gpus
                    progress.teacher_gpus = GpuReader(len(gpus), environment(gpus)).start()
                start_all(config, path, commands, layout, supervisor)
                teachers = [server.name for server in layout.teachers]
                roles = ("sampler", "learner", *(["generator"] if layout.generators else []), *teachers)
                with closing(view()) as opened:
                    _watch(config, supervisor, progress, phases, opened, roles)
            finally:
                phases.enter("shutdown")
    except FolderGone:
        raise  # there is no folder for a summary
    except (EndedEarly, UserError) as early:
        ended_early = early
    finally:
        phases.enter(None)
    if progress is None or (progress.step is None and isinstance(ended_early, UserError)):
        assert ended_early is not None
        raise ended_early  # at its start: the summary of an earlier start stays
    error = None if ended_early is None or getattr(ended_early, "code", 1) == INTERRUPTED else str(ended_early)
    summary = summarize(progress, phases, supervisor, folder)
    summary = replace(summary, finished=summary.finished and _is_saved(config, progress.steps), error=error)
    summary.write(folder / "summary.json")
    if isinstance(ended_early, UserError):
        raise ended_early
    if ended_early is not None:
        raise RunStopped(str(ended_early), ended_early.code, summary)
    return summary


def _check_folder(config: Config, folder: Path, broker: Broker) -> None:
    """If Redis does not know the run, refuse to continue its folder with changed keys that must stay the same."""
    existing = folder / "config.yaml"
    if not existing.exists() or broker.redis.exists(broker.key("config")):
        return
    changes = differences(config, read_values(existing))
    check_changes(changes, f"run folder {folder}", max(checkpoint_versions(folder), default=0))


def _watch(
    config: Config, supervisor: Supervisor, progress: Progress, phases: PhaseTimer, view: View, roles: Sequence[str]
) -> None:
    """Watch until the run is over and its processes, except the servers of teachers, have exited."""
    leave_by: float | None = None
    while True:
        supervisor.poll()
        if progress.refresh() and not progress.finished:
            phases.enter(progress.phase())
        view.update(progress, supervisor, phases)
        if progress.finished:
            phases.enter("shutdown")
            # The learner may write its last checkpoint for as long as it lives; if it dies, it is started again.
            if not supervisor.alive("learner"):
                if not _is_saved(config, progress.steps):
                    path = checkpoint(config.run.folder, progress.steps)
                    raise EndedEarly(f"the learner has exited, but the last checkpoint, {path}, is not on the disk")
                leave_by = leave_by or time.monotonic() + LEAVE_TIMEOUT
                if not workers(supervisor) or time.monotonic() > leave_by:
                    return
        # The run needs a process of each role, with which their names begin; one that has exited is not restarted.
        elif gone := [role for role in roles if not supervisor.alive(role)]:
            raise EndedEarly(f"all {gone[0]} processes have exited, but the run is not finished")
        time.sleep(POLL)


def _is_saved(config: Config, last: int) -> bool:
    """Whether the checkpoint of the last version, and the model exported with it, is in the run folder."""
    return last in checkpoint_versions(config.run.folder)


def workers(supervisor: Supervisor) -> list[str]:
    """Names of the processes that end with the run by themselves."""
    return [child.name for child in supervisor.alive() if not child.name.startswith(("redis", "teacher"))]
