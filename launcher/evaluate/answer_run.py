"""A local run without training: Redis, a sampler and generators work until every response of a request is written."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from redis.exceptions import RedisError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from common import log as logs
from common.checks.list import check_start
from common.config import Config
from common.errors import UserError, one_line, visible
from common.process import Role, keep_files_private
from common.streams.agreement import agree
from common.streams.broker import Broker
from common.unpack import unpack
from launcher.layout.layout import Choice, Placement, lay_out
from launcher.run.folder_lock import locked
from launcher.run.processes import (
    EMBEDDED,
    command,
    connected,
    generator_commands,
    in_background,
    interruptible,
    start_all,
    stopping,
)
from launcher.run.supervisor import EndedEarly, Supervisor
from sampler.files.answer_file import AnswerFile, Request

Generators = list[dict[str, Any]]
POLL = 0.1  # seconds
LINE_SECONDS = 5.0  # between two lines of progress
SHOWN_REASONS = 3


@dataclass(frozen=True)
class AnswerCount:
    """How many answers are wanted and how many are in the file; `reasons` counts why this call skipped others."""

    wanted: int
    answered: int
    reasons: dict[str, int] = field(default_factory=dict)

    def missing(self) -> str:
        """One line that says how many are missing, and why."""
        reasons = sorted(self.reasons.items(), key=lambda item: -item[1])
        shown = "; ".join(f"{count} × {one_line(reason)}" for reason, count in reasons[:SHOWN_REASONS])
        more = f"; and {len(reasons) - SHOWN_REASONS} other reasons" if len(reasons) > SHOWN_REASONS else ""
        missing = self.wanted - self.answered
        return f"{missing:,} responses were skipped ({shown}{more}); the same command asks for them again"


@dataclass(frozen=True, slots=True)
class AnswerScreen:
    """The terminal on which a command shows how its request is answered; without a console nothing is shown."""

    title: str = ""
    console: Console | None = None
    plain: bool = False

    def log(self, folder: Path) -> Any:
        file = folder / "launcher.log"
        if self.console is None:
            return logs.to_file("launcher", file)
        return logs.setup("launcher", file=None if self._is_plain else file)

    def view(self, log: Any, wanted: int) -> AnswerView:
        return LineView(log, wanted) if self._is_plain else BarView(self.console, self.title, wanted)

    def show(self, line: str) -> None:
        if self.console is not None:
            self.console.print(visible(line), markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def command(self) -> Iterator[None]:
        """Stop the processes at a signal; raises `SystemExit` if answers are missing."""
        try:
            with interruptible():
                yield
        except EndedEarly as stopped:
            (how,) = getattr(stopped, "__notes__", ["the same command continues from here"])
            self.show(f"{stopped}; {how}")
            raise SystemExit(stopped.code) from None

    @property
    def _is_plain(self) -> bool:
        return self.console is None or self.plain or not self.console.is_terminal


UNSEEN = AnswerScreen()


def answer(
    config: Config, request: Request, *, generators: int | None, redis: str, screen: AnswerScreen
) -> AnswerCount:
    """Answer a request with the model of `config`; raises what `answer_here` raises."""
    if generators is None and redis != EMBEDDED:
        generators = 0
    keep_files_private()
    try:
        is_new = not request.folder.exists()
        request.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--output {request.output}: its folder of logs, {request.folder}, cannot be made: {error.strerror}"
        ) from None
    log = screen.log(request.folder)
    view = partial(screen.view, log)
    try:
        count = answer_here(config, request, generators=generators, redis=redis, view=view, log=log)
    except UserError:
        if is_new:
            shutil.rmtree(request.folder, ignore_errors=True)
        raise
    if count.answered < count.wanted:
        screen.show(count.missing())
    return count


def answer_here(
    config: Config, request: Request, *, generators: int | None, redis: str, view: Callable[[int], AnswerView], log: Any
) -> AnswerCount:
    """Get the answers that the file lacks; starts no process if it lacks none.

    Args:
        generators: how many to start here; None means as many as this machine has room for.
            Others may join if `redis` is a running server.
        redis: `embedded`, or the address of a running server.
        view: opens the display, given how many answers are wanted.

    Raises:
        EndedEarly: on Ctrl-C (code 130), or because a process failed (code 1).
        UserError: what the user gave cannot be used.
    """
    from sampler.answers import load_questions  # imports pyarrow, which not every role has

    run = config.run.model_copy(update={"steps": 0, "output_dir": str(request.folder)})
    config = config.model_copy(update={"run": run})
    prompts = load_questions(config, request, log)
    wanted = list(request.task_ids(prompts.ids))

    def answered() -> int:
        file = AnswerFile(request.output, prompts.ids, log)
        return sum(task_id in file for task_id in wanted)

    with locked(request.folder, "--output") as lock:
        present = answered()
        if present == len(wanted):
            return AnswerCount(len(wanted), present)
        check_start(Role.GENERATOR, config)
        layout = Placement((), ()) if generators == 0 else lay_out(config, Choice(generators))
        log.info("asking", prompts=len(prompts), responses=len(wanted), answered=present)
        supervisor = Supervisor(request.folder / "logs", log, lock=lock)
        work = partial(_run, config, request, layout, redis, lambda: view(len(wanted)), supervisor)
        future = in_background(work, supervisor)
        try:
            reasons = future.result()
        except KeyboardInterrupt:
            supervisor.interrupted.set()
            reasons = future.result()
        return AnswerCount(len(wanted), answered(), reasons)


def _run(
    config: Config,
    request: Request,
    layout: Placement,
    redis: str,
    view: Callable[[], AnswerView],
    supervisor: Supervisor,
) -> dict[str, int]:
    """Run all processes until the sampler exits; returns how many tasks were skipped for each reason."""
    folder, path = request.folder, request.folder / "config.yaml"
    with stopping(supervisor):
        config, broker = connected(config, redis, folder, layout, supervisor)
        agree(broker, config, supervisor.log)
        options = ["--kind", request.kind, "--responses", str(request.responses), "--answers", str(request.output)]
        options += [] if request.data is None else ["--data", request.data]
        commands = {"sampler": command("sampler.cli", path, *options)} | generator_commands(path, layout)
        start_all(config, path, commands, layout, supervisor)
        progress = _Progress(broker)
        with closing(view()) as opened:
            while supervisor.alive("sampler"):
                supervisor.poll()
                if layout.generators and not supervisor.alive("generator"):
                    raise EndedEarly("all generator processes have exited, but some prompts are not answered")
                progress.refresh()
                opened.update(progress.answered, sum(progress.reasons.values()), progress.generators)
                time.sleep(POLL)
            progress.refresh()
    return progress.reasons


class _Progress:
    """The progress that sampler and generators publish; it is not updated while Redis does not answer."""

    def __init__(self, broker: Broker) -> None:
        self.answered = 0
        self.reasons: dict[str, int] = {}
        self.generators: list[dict[str, Any]] = []
        self._broker = broker

    def refresh(self) -> None:
        try:
            answered, reasons = self._broker.redis.hmget(self._broker.key("state"), "answered", "reasons")
            processes = self._broker.processes().values()
        except RedisError:
            return
        self.answered, self.reasons = int(answered or 0), unpack(reasons) if reasons else {}
        self.generators = [process for process in processes if process.get("role") == "generator"]


class AnswerView(Protocol):
    def update(self, answered: int, set_aside: int, generators: Generators) -> None: ...

    def close(self) -> None:
        """End the display; by default there is nothing to do."""
        return


class LineView(AnswerView):
    """Logs a line when there are new answers, at most every few seconds."""

    def __init__(self, log: Any, wanted: int) -> None:
        self.log, self.wanted = log, wanted
        self._next = 0.0
        self._shown: tuple[Any, ...] = ()

    def update(self, answered: int, set_aside: int, generators: Generators) -> None:
        state = (answered, set_aside, len(generators))
        if time.monotonic() < self._next or state == self._shown:
            return
        self._next, self._shown = time.monotonic() + LINE_SECONDS, state
        self.log.info("progress", answered=f"{answered}/{self.wanted}", set_aside=set_aside, now=doing(generators))


class BarView:
    """A progress bar with the remaining time."""

    def __init__(self, console: Console | None, title: str, wanted: int) -> None:
        self.progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[doing]}", style="dim", markup=False),
            console=console,
            transient=True,
        )
        self.task = self.progress.add_task(title, total=wanted, doing="")
        self.progress.start()

    def update(self, answered: int, set_aside: int, generators: Generators) -> None:
        aside = f", {set_aside} skipped" if set_aside else ""
        self.progress.update(self.task, completed=answered, doing=doing(generators) + aside)

    def close(self) -> None:
        self.progress.stop()


def doing(generators: Generators) -> str:
    running = [generator for generator in generators if generator.get("state") == "running"]
    if running:
        tokens = sum(float(generator.get("tokens_per_second", 0.0)) for generator in running)
        return f"{len(running)} generator{'s' * (len(running) > 1)}, {tokens:,.0f} tokens/s"
    return str(generators[0].get("state")) if generators else "waiting for generators"
