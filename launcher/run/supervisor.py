"""Starts the processes of a run, restarts those that die, and stops them all.

Each process leads a session of its own. Therefore Ctrl-C in the terminal reaches only the launcher, and a process is
killed together with everything it has started.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from common.errors import UserError, one_line
from common.held_folder import check_folder
from common.log import MAX_BYTES, Timeline
from common.process import ending
from launcher.run.notices import Notices

State = Literal["running", "restarting", "exited", "failed"]
USER_ERROR, INTERRUPTED = 2, 130  # exit codes
MAX_RESTARTS = 5  # within `WINDOW`
WINDOW = 3600.0  # seconds; a process may take minutes to start, and then die again
LONGEST_PAUSE = 8.0  # seconds before a process is started again


class EndedEarly(Exception):
    """A run, a training or an evaluation ended early: it was stopped (`code` 130), or a process failed.

    `code` is then 1, or in `spo.sft` the exit code of the rank that failed.
    """

    def __init__(self, reason: str, code: int = 1) -> None:
        super().__init__(reason)
        self.code = code


@dataclass(slots=True)
class RunProcess:
    name: str
    command: Sequence[str]
    env: Mapping[str, str]
    log: Path
    process: subprocess.Popen[bytes]
    state: State = "running"
    restarts: int = 0
    deaths: list[float] = field(default_factory=list)  # times of the failures within `WINDOW`, by the monotonic clock
    restart_at: float = 0.0
    started: float = field(default_factory=time.time)

    @property
    def pid(self) -> int:
        """Process id, which is also its process group."""
        return self.process.pid

    def last_log_line(self) -> str:
        return next(reversed(self._log_lines()), "it wrote nothing")

    def error_line(self) -> str:
        """The last `error:` line of the log, since libraries may write more lines while a process ends."""
        lines = self._log_lines()
        named = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        return named[-1] if named else self.last_log_line()

    def _log_lines(self) -> list[str]:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return [one_line(line) for line in lines if line.strip()]


@dataclass(slots=True)
class Supervisor:
    """All processes of one run; `poll` is called often and returns at once.

    A process that exits with 0 ended on purpose. One that exits with 2 refused its configuration, which ends the run.
    Any other exit is a failure, and the process is restarted after a pause that doubles each time.

    Processes are polled and not awaited by an asyncio.TaskGroup: asyncio collects a process's exit code at once, and
    then the group id could be given to another group before the rest of this one is killed.
    """

    logs: Path
    log: Any
    max_restarts: int = MAX_RESTARTS  # a process that fails more often within `WINDOW` seconds ends the run
    backoff: float = 0.5
    # A locked file that the reaper inherits; if this process is killed, it stays locked until all have ended.
    lock: IO[str] | None = None
    children: dict[str, RunProcess] = field(default_factory=dict)
    notices: Notices = field(default_factory=Notices)
    interrupted: threading.Event = field(default_factory=threading.Event)  # set by another thread to end the run
    after: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)  # closed once all processes have ended
    timeline: Timeline = field(init=False)
    _reaper: subprocess.Popen[str] | None = None

    def __post_init__(self) -> None:
        self.timeline = Timeline(self.logs.parent, "launcher")

    def start(self, name: str, command: Sequence[str], env: Mapping[str, str] | None = None) -> RunProcess:
        """Start a process with its output in `<logs>/<name>.log`; `env` is added to this process's environment."""
        self.logs.mkdir(parents=True, exist_ok=True)
        path = self.logs / f"{name}.log"
        environment = dict(os.environ) | dict(env or {})
        self.notices.follow(path)
        child = RunProcess(name, command, environment, path, self._spawn(command, environment, path))
        self.children[name] = child
        self.timeline.instant("started", process=name)
        self.log.info("started", process=name, pid=child.pid)
        return child

    def poll(self) -> None:
        """Handle the processes that have ended, and restart those that have failed.

        Raises:
            EndedEarly: another thread wants the run to end, or a process failed too often.
            UserError: a process refused its configuration.
            FolderGone: the run folder is no longer where it was.
        """
        if self.interrupted.is_set():
            raise EndedEarly("stopped", INTERRUPTED)
        if self.lock is not None:
            check_folder(self.logs.parent, self.lock.fileno(), "lock")
        for child in self.children.values():
            self.notices.read(child.name, child.log)
            _bound(child.log)
            if child.state == "running" and _ended(child.process):
                self._handle_exit(child)
            elif child.state == "restarting" and time.monotonic() >= child.restart_at:
                child.process = self._spawn(child.command, child.env, child.log)
                child.restarts += 1
                child.state, child.started = "running", time.time()
                self.timeline.instant("started again", process=child.name)
                self.log.warning("started again", process=child.name, pid=child.pid, restarts=child.restarts)

    def alive(self, prefix: str = "") -> list[RunProcess]:
        """Processes that are running or being restarted, and whose names start with `prefix`."""
        return [
            child
            for name, child in self.children.items()
            if name.startswith(prefix) and child.state in ("running", "restarting")
        ]

    def stop(self, grace: float = 7.0) -> None:
        """Stop all processes, Redis after the others: SIGTERM, and after `grace` seconds SIGKILL to the group.

        Without `grace` they are killed at once, and nothing is logged.
        """
        self._stop([child for name, child in self.children.items() if name != "redis"], grace)
        self._stop([child for name, child in self.children.items() if name == "redis"], 2.0)
        if self._reaper is not None and self._reaper.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it was killed, and a line for it is still buffered
                self._reaper.stdin.close()
            self._reaper.wait()
            self._reaper = None
        self.after.close()

    def _stop(self, children: list[RunProcess], grace: float) -> None:
        running = [child for child in children if child.state == "running"]
        for child in running:
            with contextlib.suppress(ProcessLookupError):
                child.process.send_signal(signal.SIGTERM if grace else signal.SIGKILL)
        deadline = time.monotonic() + grace
        while time.monotonic() < deadline and not all(_ended(child.process) for child in running):
            time.sleep(0.02)
        for child in running:
            if grace and not _ended(child.process):
                self.log.warning("killed, as it did not stop in time", process=child.name)
            self._reap(child)
        for child in children:
            child.state = "exited" if child.state in ("running", "restarting") else child.state

    def _handle_exit(self, child: RunProcess) -> None:
        code = self._reap(child)
        if code == 0:
            child.state = "exited"
            self.log.info("exited", process=child.name)
            return
        reason = ending(code)
        child.state = "failed"
        if code == USER_ERROR:
            raise UserError(f"{child.name}: {child.error_line()}")
        now = time.monotonic()
        child.deaths = [death for death in child.deaths if now - death < WINDOW] + [now]
        if len(child.deaths) > self.max_restarts:
            raise EndedEarly(
                f"{child.name} died {len(child.deaths)} times, the last with {reason}: {child.last_log_line()} "
                f"(see {child.log})"
            )
        pause = min(self.backoff * 2 ** min(len(child.deaths) - 1, 16), LONGEST_PAUSE)
        child.state = "restarting"
        self.timeline.instant("died", process=child.name, reason=reason)
        child.restart_at = now + pause
        self.log.warning("died", process=child.name, reason=reason, again_in=pause, log=str(child.log))

    def _reap(self, child: RunProcess) -> int:
        """Kill the rest of the group, then collect the exit code; until then no other group can get this id."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        code = child.process.wait()
        self.timeline.slice(child.name, child.started, lane=child.name, code=code)
        self._tell_reaper(f"-{child.pid}")
        return code

    def _spawn(self, command: Sequence[str], env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        with log.open("ab") as output:
            try:
                process = subprocess.Popen(
                    list(command),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=dict(env),
                    start_new_session=True,
                )
            except OSError as error:
                raise UserError(f"cannot start {command[0]}: {error.strerror}") from None
        self._tell_reaper(f"+{process.pid}")
        return process

    def _tell_reaper(self, line: str) -> None:
        if self._reaper is None:
            self._reaper = subprocess.Popen(
                [sys.executable, "-S", str(Path(__file__).with_name("reaper.py"))],
                stdin=subprocess.PIPE,
                pass_fds=[] if self.lock is None else [self.lock.fileno()],
                text=True,
                start_new_session=True,
            )
        pipe: IO[str] | None = self._reaper.stdin
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):
            pipe.write(line + "\n")
            pipe.flush()


def _bound(log: Path) -> None:
    """Copy a log that is too large to `NAME.old.log` and empty it; its process continues in the same file."""
    with contextlib.suppress(OSError):
        if log.stat().st_size > MAX_BYTES:
            shutil.copyfile(log, log.with_suffix(".old.log"))
            os.truncate(log, 0)


def _ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether a process has ended; does not collect its exit code, so that no other group can get its id."""
    if process.returncode is not None:
        return True
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
