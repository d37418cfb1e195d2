"""A worker process, started by `LocalSandbox`, with messages on stdin and stdout (`protocol.py`).

The first message holds the settings; the answer is empty or an `error`. Each further message with one blob is a
request as JSON, answered by its result; a message without one tells the running program to stop. At the end of
stdin the worker ends, together with what it runs.

The process that `LocalSandbox` starts is the worker's keeper. Bubblewrap dies with the worker, except while it is
starting. The processes that a killed worker leaves are then adopted by the keeper, which kills them.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from common.keeper import adopt_orphans, die_with_parent, keep
from sandbox_client.worker import command, privileges, protocol
from sandbox_client.worker.cgroup import MemoryGroup
from sandbox_client.worker.protocol import ProgramLimits, WorkerSettings
from sandbox_client.worker.request import CannotRun, check
from sandbox_client.worker.run import ProgramResult, ProgramRunner, RunCancelled

IN, OUT = 0, 1
WORKER_MB = 32  # this process, beside four copies of a request's files


def main() -> None:
    """Start the worker, and end all that it started; the last argument is the parent's process id."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches all; the parent decides
    keep(int(sys.argv[-1]), (IN, OUT), signal.SIGTERM)
    work()


def work() -> None:
    """Run programs until stdin ends."""
    signal.signal(signal.SIGTERM, leave)
    os.umask(0o022)  # the caller's may be strict, but a program's user must be able to read its files
    first = protocol.receive(IN)
    if first is None:
        return
    values = first[0]["settings"]
    settings = WorkerSettings(**{**values, "limits": ProgramLimits(**values["limits"])})
    try:
        runner = ProgramRunner(settings, prepare(settings), IN)
    except OSError as error:
        protocol.send(OUT, protocol.pack({"error": str(error)}))
        return
    protocol.send(OUT, protocol.pack({}))
    while (message := protocol.receive(IN)) is not None:
        if message[1]:
            with contextlib.suppress(RunCancelled):
                header, blobs = answer(runner, settings, message[1].pop())
                protocol.send(OUT, protocol.pack(header, blobs))
                continue
            protocol.send(OUT, protocol.pack({"failure": "stopped"}))


def leave(*_: object) -> None:
    """Unwind at SIGTERM, so that the program is killed and its files are removed."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(0)


def prepare(settings: WorkerSettings) -> MemoryGroup | None:
    """Enter the control group and give up root; raises `OSError`."""
    group, keeper = None, os.getppid()
    if settings.group is not None:
        group = MemoryGroup.join(
            Path(settings.group), (WORKER_MB + 4 * settings.limits.files_mb) << 20, settings.endpoint is not None
        )
    if settings.uid is not None:
        privileges.reach(settings.needed)
        privileges.drop(settings.uid)
    # After `drop`: the kernel clears this setting when the user changes.
    die_with_parent(lambda: os.getppid() == keeper, signal.SIGTERM)
    adopt_orphans()
    os.chdir("/")
    return group


def answer(runner: ProgramRunner, settings: WorkerSettings, body: bytes) -> protocol.Message:
    """Run one request; raises `RunCancelled` if the caller has cancelled it."""
    with work_folder(settings) as folder:
        try:
            result = runner.run(check(json.loads(body), settings.limits, folder), folder)
        except CannotRun as refused:
            return {"refused": str(refused)}, []
        except OSError as error:
            return {"failure": f"the program could not be started: {error}"}, []
    return message(result)


def message(result: ProgramResult) -> protocol.Message:
    """A result, with its files as base64."""
    header = {
        "seconds": result.seconds,
        "code": result.code,
        "timed_out": result.timed_out,
        "message": result.message,
        "failure": result.failure,
        "files": list(result.files),
    }
    return header, [result.stdout, result.stderr, *map(base64.b64encode, result.files.values())]


@contextlib.contextmanager
def work_folder(settings: WorkerSettings) -> Iterator[str]:
    """The program's work folder: inside the sandbox or, for a program that has none, a folder of the host."""
    if settings.bwrap is not None:
        yield command.WORK
        return
    folder = os.path.realpath(tempfile.mkdtemp(prefix="spo-sandbox-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
