"""Shows a run from its start to the closing table, for the commands that start one."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from warnings import warn

from rich.console import Console

from common import log as logs
from common.config import Config
from common.config.warnings import warnings
from common.errors import UserError, visible
from common.process import keep_files_private
from launcher.run.display import LiveView, PlainView, View
from launcher.run.local_run import RunOptions, run_here, start
from launcher.run.processes import interruptible
from launcher.run.progress import PhaseTimer
from launcher.run.started import RunStopped, StartedRun
from launcher.run.summary import next_steps, table


@dataclass(frozen=True, slots=True)
class Screen:
    """The terminal or plain output of a run, the launcher's log, and the wall time by phase."""

    console: Console
    plain: bool
    log: Any
    phases: PhaseTimer = field(default_factory=PhaseTimer)

    @classmethod
    def open(cls, plain: bool, folder: Path) -> Screen:
        """Set up the launcher's log: to stderr, or into the run folder while the live view uses the terminal.

        Raises:
            UserError: the run folder cannot be made.
        """
        console, folder_of_logs = Console(), logs_folder(folder)
        plain = plain or not console.is_terminal
        screen = cls(console, plain, logs.setup("launcher", file=None if plain else folder_of_logs / "launcher.log"))
        screen.phases.enter("set-up")
        return screen

    def view(self, config: Config) -> View:
        return PlainView(self.log) if self.plain else LiveView(self.console, str(config.run.folder))


def start_unseen(config: Config, options: RunOptions) -> StartedRun:
    """Start a run without a screen: its progress is in `logs/launcher.log`; raises what `start` raises."""
    phases = PhaseTimer()
    phases.enter("set-up")
    log = logs.to_file("launcher", logs_folder(config.run.folder) / "launcher.log")
    for line in warnings(config):
        warn(line, stacklevel=3)
    return start(config, options, lambda: PlainView(log), log, phases)


def logs_folder(folder: Path) -> Path:
    """The folder of a run's logs, which is made if need be; raises `UserError` if it cannot be."""
    keep_files_private()
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"run folder {folder} cannot be made: {error.strerror}; set run.output_dir") from None
    return folder / "logs"


def show_run(config: Config, options: RunOptions, screen: Screen) -> None:
    """Run `config` and print its closing table; raises `SystemExit` with the run's code if it stops before its end."""
    console = screen.console
    for line in warnings(config):
        screen.log.warning(line)
        if not screen.plain:
            # With the live view the log goes to a file, so the warning is printed here too.
            console.print(f"warning: {line}", style="yellow", markup=False, highlight=False)
    try:
        with interruptible():
            summary = run_here(config, options, lambda: screen.view(config), screen.log, screen.phases)
    except RunStopped as stopped:
        console.print(table(stopped.summary))
        line = f"{stopped}; to continue: spo run {stopped.summary.folder}/config.yaml"
        console.print(visible(line), markup=False, highlight=False)
        raise SystemExit(stopped.code) from None
    console.print(table(summary))
    console.print(visible(next_steps(summary)), markup=False, highlight=False, soft_wrap=True)
