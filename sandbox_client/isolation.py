"""Proof that a local sandbox holds, before anything untrusted runs in it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import math
import os
import secrets
import socket
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import UserError
from sandbox_client.local import LocalSandbox
from sandbox_client.settings import Limits, Settings
from sandbox_client.types import RunCodeRequest, RunCodeResponse, SandboxUnavailable
from sandbox_client.worker.main import OWN_MB

PROOF_SECONDS = 20.0  # far above what it takes, so that a busy machine is no leak
SMALL_MB = 128
BEYOND = 1.25  # times what a run and its worker may have together
MOST_OF = 0.6  # of its own limit a process can fill beside the interpreter

# Several processes, each within its own limit, together above that of all; killed, or it waits for ever.
TOGETHER = """
import os, signal
size, count = map(int, input().split())
for _ in range(count):
    if os.fork() == 0:
        block = b"x" * size
        signal.pause()
signal.pause()
"""
SWITCHES = {
    "/proc/sys/user/max_user_namespaces": ("0", "sysctl -w user.max_user_namespaces=10000"),
    "/proc/sys/kernel/unprivileged_userns_clone": ("0", "sysctl -w kernel.unprivileged_userns_clone=1"),
    "/proc/sys/kernel/apparmor_restrict_unprivileged_userns": (
        "1",
        "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0, or an AppArmor profile that lets bwrap have them",
    ),
}
CONTAINER = "--security-opt seccomp=unconfined --security-opt apparmor=unconfined --security-opt systempaths=unconfined"


@dataclass(frozen=True)
class Report:
    """What `prove` found: seconds it took, and whether a control group bounds memory exactly or a watch about."""

    seconds: float
    cgroup: str | None


async def prove(sandbox: LocalSandbox) -> Report:
    """Try to get out: of the host's files, network, processes and namespaces, and past each limit.

    Raises:
        UserError: something leaked, or programs cannot be isolated here; the message names it and how to mend it.
    """
    started = time.monotonic()
    limits = sandbox.settings.limits
    small = min(SMALL_MB, limits.memory_mb)
    with Bait() as bait:
        told = {name: getattr(limits, name) for name in ("memory_mb", "processes", "file_mb", "disk_mb")}
        tries = RunCodeRequest(
            code=Path(__file__).with_name("escape_attempts.py").read_text(encoding="utf-8"),
            stdin=json.dumps({**bait.told(), **told}),
            run_timeout=PROOF_SECONDS,
            memory_limit_MB=limits.memory_mb,
        )
        together = greedy(limits)
        greed = RunCodeRequest(
            code=TOGETHER if together else "", stdin=together, run_timeout=PROOF_SECONDS, memory_limit_MB=small
        )
        shell = RunCodeRequest(code="echo $((6 * 7))", language="bash", run_timeout=PROOF_SECONDS)
        try:
            tried, taken, echoed = await asyncio.gather(*map(sandbox.run_code, (tries, greed, shell)))
        except SandboxUnavailable as error:
            raise UserError(f"programs cannot be isolated here: {error}; {advice(str(error))}") from None
        leaks = {**judge(tried), **bait.harm()}
    if together and not taken.message.startswith("processes were killed"):
        said = taken.message or (taken.run_result and taken.run_result.stderr) or "it ended by itself"
        leaks["memory together"] = f"processes were to hold more than the {small} MB of a run, and: {said[-300:]}"
    if echoed.run_result is None or echoed.run_result.stdout != "42\n":
        leaks["bash"] = f"it does not run: {echoed.message or echoed.run_result}"
    if leaks:
        raise UserError("the sandbox leaks: " + "; ".join(f"{name}: {what}" for name, what in leaks.items()))
    return Report(time.monotonic() - started, str(sandbox.cgroup) if sandbox.cgroup else None)


@functools.cache
def prove_here(settings: Settings) -> Report:
    """The same for settings, once a process; blocks, with or without an event loop running in this thread."""
    outcome: list[Report | UserError] = []

    async def once() -> None:
        try:
            async with LocalSandbox(settings) as sandbox:
                outcome.append(await prove(sandbox))
        except UserError as error:
            outcome.append(error)

    thread = threading.Thread(target=lambda: asyncio.run(once()), name="sandbox-proof")
    thread.start()
    thread.join()
    if isinstance(outcome[0], UserError):
        raise outcome[0]
    return outcome[0]


def greedy(limits: Limits) -> str:
    """What `TOGETHER` is told: bytes of a process, and how many there are to be.

    A control group holds the worker too. Where few processes are allowed, each takes more; it is nothing where their
    own limits keep them from it.
    """
    small = min(SMALL_MB, limits.memory_mb)
    total = math.ceil(BEYOND * (small + OWN_MB + 4 * limits.files_mb))
    count = max(1, min(math.ceil(total / (small / 4)), limits.processes - 2))
    size = math.ceil(total / count)
    return f"{size << 20} {count}" if size <= MOST_OF * small else ""


class Bait:
    """Things of the host that a program must neither find nor harm: a file, two listeners, a process."""

    def __init__(self) -> None:
        self.name = f"spo-bait-{secrets.token_hex(8)}"
        self.folder = tempfile.TemporaryDirectory(prefix="spo-bait-")
        os.chmod(self.folder.name, 0o755)  # nothing but the sandbox is to keep programs from it
        self.file = Path(self.folder.name) / "file"
        self.file.write_text(self.name)
        self.listeners = [socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX)]
        self.listeners[1].bind("\0" + self.name)
        self.listeners[1].listen()
        self.victim = subprocess.Popen(["sh", "-c", "read line", self.name], stdin=subprocess.PIPE)

    def __enter__(self) -> Bait:
        return self

    def __exit__(self, *_: object) -> None:
        self.victim.kill()
        self.victim.communicate()
        for listener in self.listeners:
            listener.close()
        self.folder.cleanup()

    def told(self) -> dict[str, Any]:
        """What a program is told, that it may try."""
        files = ["/etc/shadow", str(self.file), str(Path.home() / ".bashrc"), str(Path.home() / ".ssh" / "known_hosts")]
        return {"name": self.name, "secrets": files, "port": self.listeners[0].getsockname()[1]}

    def harm(self) -> dict[str, str]:
        """What happened to it."""
        found = {}
        if self.file.read_text() != self.name:
            found["host file"] = "it was changed"
        if self.victim.poll() is not None:
            found["host process"] = "it was killed"
        for listener in self.listeners:
            listener.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                listener.accept()[0].close()
                found["host listener"] = "it was reached"
        return found


def judge(answer: RunCodeResponse) -> dict[str, str]:
    """The attempts that succeeded, with what they found.

    Raises:
        UserError: the program that tries did not run to its end.
    """
    result = answer.run_result
    with contextlib.suppress(ValueError, TypeError):
        if result is not None and result.return_code == 0:
            return dict(json.loads(result.stdout or ""))
    said = answer.message or (result and (result.stderr or result.status)) or "no answer"
    raise UserError(f"Python does not run in the sandbox: {said[-300:]}; choose another interpreter with --python")


def advice(failure: str) -> str:
    """How to make a machine ready, from what failed and what its switches say."""
    if "Can't find source path" in failure:
        return "a folder cannot be reached by the user that programs run as; choose another interpreter with --python"
    for path, (off, remedy) in SWITCHES.items():
        with contextlib.suppress(OSError):
            if Path(path).read_text().strip() == off:
                return f"user namespaces are off ({path} is {off}); switch them on: {remedy}"
    return f"in a container, start it with {CONTAINER}; else see docs/sandbox.md"
