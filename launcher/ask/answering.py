"""What `spo values estimate` and `spo eval` have in common as commands: views, messages and exit codes."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from common import log as logs
from common.config import Config
from common.errors import one_line, visible
from common.process import keep_files_private
from launcher.ask.ask_run import Answers, AskStopped, Request, ask_here
from launcher.ask.view import BarView, LineView, View
from launcher.run.processes import EMBEDDED, default_generators

SHOWN_REASONS = 3


def without_learner(config: Config, folder: Path) -> Config:
    """The configuration of a run in which nothing is trained, with its files below `folder`."""
    run = config.run.model_copy(update={"steps": 0, "output_dir": str(folder)})
    return config.model_copy(update={"run": run})


def answer(
    config: Config, request: Request, *, title: str, generators: int | None, redis: str, plain: bool, console: Console
) -> Answers:
    """Have a request answered; leaves with an exit code if it is stopped before its end."""
    if generators is None:
        generators = default_generators(config) if redis == EMBEDDED else 0
    keep_files_private()
    plain = plain or not console.is_terminal
    request.folder.mkdir(parents=True, exist_ok=True)
    log = logs.setup("launcher", file=None if plain else request.folder / "launcher.log")

    def view(wanted: int) -> View:
        return LineView(log, wanted) if plain else BarView(console, title, wanted)

    try:
        answers = ask_here(config, request, generators=generators, redis=redis, view=view, log=log)
    except AskStopped as stopped:
        console.print(visible(f"{stopped}; the same command goes on where it stopped"), markup=False, highlight=False)
        raise SystemExit(stopped.code) from None
    if answers.answered < answers.wanted:
        console.print(visible(_missing(answers)), markup=False, highlight=False, soft_wrap=True)
    return answers


def _missing(answers: Answers) -> str:
    missing = answers.wanted - answers.answered
    reasons = sorted(answers.reasons.items(), key=lambda item: -item[1])
    shown = "; ".join(f"{count} × {one_line(reason)}" for reason, count in reasons[:SHOWN_REASONS])
    more = f"; and {len(reasons) - SHOWN_REASONS} other reasons" if len(reasons) > SHOWN_REASONS else ""
    return f"{missing:,} responses were set aside ({shown}{more}); the same command asks for them again"
