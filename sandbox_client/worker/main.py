"""A worker: started by `LocalSandbox`, with messages on stdin and stdout (`sandbox_client.frames`).

The first message holds the settings; the answer is empty or an `error`. Each further message with one blob is a
request as JSON, answered by its result; a message without one tells the program under way to stop. At the end of
stdin the worker ends, and what it runs with it.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

from sandbox_client import frames
from sandbox_client.settings import Resolved
from sandbox_client.worker import command, privileges
from sandbox_client.worker.cgroup import Group
from sandbox_client.worker.request import Refused, check
from sandbox_client.worker.run import Result, Runner, Stopped

IN, OUT = 0, 1
WORKER_MB = 32  # this process, beside four copies of a request's files


def main() -> None:
    """Run programs until stdin ends."""
    signal.signal(signal.SIGTERM, leave)
    os.umask(0o022)  # the caller's may be strict, and what a program is given must be readable by its own user
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches all; our parent decides
    first = frames.receive(IN)
    if first is None:
        return
    settings = Resolved.from_dict(first[0]["settings"])
    try:
        runner = Runner(settings, prepare(settings, first[0]["parent"]), IN)
    except OSError as error:
        frames.send(OUT, frames.pack({"error": str(error)}))
        return
    frames.send(OUT, frames.pack({}))
    while (message := frames.receive(IN)) is not None:
        if message[1]:
            with contextlib.suppress(Stopped):
                header, blobs = answer(runner, settings, message[1].pop())
                frames.send(OUT, frames.pack(header, blobs))
                continue
            frames.send(OUT, frames.pack({"failure": "stopped"}))


def leave(*_: object) -> None:
    """Handle SIGTERM: unwind, so that the program is killed and its files are removed."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(0)


def prepare(settings: Resolved, parent: int) -> Group | None:
    """Enter the control group and leave root behind; raises `OSError`."""
    group = None
    if settings.group is not None:
        group = Group.join(Path(settings.group), (WORKER_MB + 4 * settings.limits.files_mb) << 20)
    if settings.uid is not None:
        privileges.reach(settings.needed)
        privileges.drop(settings.uid)
    privileges.end_with_parent(parent)
    os.chdir("/")
    return group


def answer(runner: Runner, settings: Resolved, body: bytes) -> frames.Message:
    """Run one request.

    Raises:
        Stopped: the caller has cancelled it.
    """
    with work_folder(settings) as folder:
        try:
            result = runner.run(check(json.loads(body), settings.limits, folder), folder)
        except Refused as refused:
            return {"refused": str(refused)}, []
        except OSError as error:
            return {"failure": f"the program could not be started: {error}"}, []
    return message(result)


def message(result: Result) -> frames.Message:
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
def work_folder(settings: Resolved) -> Iterator[str]:
    """Where the program runs: a place inside the sandbox or, for a program that has none, a folder of the host."""
    if settings.bwrap is not None:
        yield command.WORK
        return
    folder = os.path.realpath(tempfile.mkdtemp(prefix="spo-sandbox-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
