"""Checks that a local sandbox isolates programs by trying to break out, before anything untrusted runs in it."""

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
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from common.errors import UserError
from sandbox_client.local import LocalSandbox
from sandbox_client.settings import Settings
from sandbox_client.types import RunCodeRequest, RunCodeResponse, SandboxUnavailable
from sandbox_client.worker.main import WORKER_MB

TIMEOUT = 60.0  # seconds; far more than it takes, so that a busy machine does not count as a leak
SMALL_MB = 128
EXCESS = 1.25  # times the memory that a run and its worker may use together
USABLE = 0.6  # part of its own limit that a process can fill beside the interpreter

# Several processes, each within its own limit, together above that of the run. They wait until they are killed.
MEMORY_HOG = """
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
OTHER_PYTHON = "choose another interpreter with -o python=PATH"
CONTAINER = "--security-opt seccomp=unconfined --security-opt apparmor=unconfined --security-opt systempaths=unconfined"


async def check_isolation(sandbox: LocalSandbox) -> float:
    """Try to break out: to the host's files, network, processes and namespaces, and past each limit.

    Returns the seconds it took.

    Raises:
        UserError: something leaked, or programs cannot be isolated here; the message says what and how to fix it.
    """
    started = time.monotonic()
    limits = sandbox.settings
    hog_mb = min(SMALL_MB, limits.memory_mb)
    with Canary() as canary:
        sizes = {name: getattr(limits, name) for name in ("memory_mb", "processes", "file_mb", "disk_mb")}
        attempts = RunCodeRequest(
            code=Path(__file__).with_name("escape_attempts.py").read_text(encoding="utf-8"),
            stdin=json.dumps({**canary.parameters(), **sizes, "tcp": limits.endpoint is not None}),
            run_timeout=TIMEOUT,
            memory_limit_MB=limits.memory_mb,
        )
        hog_input = memory_hog_input(limits)
        hog = RunCodeRequest(
            code=MEMORY_HOG if hog_input else "", stdin=hog_input, run_timeout=TIMEOUT, memory_limit_MB=hog_mb
        )
        shell = RunCodeRequest(code="echo $((6 * 7))", language="bash", run_timeout=TIMEOUT)
        try:
            tried, killed, echoed = await asyncio.gather(*map(sandbox.run_code, (attempts, hog, shell)))
        except SandboxUnavailable as error:
            raise UserError(f"programs cannot be isolated here: {error}; {advice(str(error))}") from None
        leaks = {**_successful_attempts(tried), **canary.harm()}
    if hog_input and not killed.message.startswith("processes were killed"):
        outcome = killed.message or (killed.run_result and killed.run_result.stderr) or "it ended by itself"
        leaks["memory together"] = (
            f"processes that together exceeded the {hog_mb} MB of a run were not killed for it: {outcome[-300:]}"
        )
    if echoed.run_result is None or echoed.run_result.stdout != "42\n":
        leaks["bash"] = f"it does not run: {echoed.message or echoed.run_result}"
    if leaks:
        raise UserError("the sandbox leaks: " + "; ".join(f"{name}: {evidence}" for name, evidence in leaks.items()))
    return time.monotonic() - started


@functools.cache
def check_isolation_once(settings: Settings) -> None:
    """Check a sandbox with these settings, once in this process.

    It blocks, and runs an event loop in a thread, since the caller may have one in its own.
    """

    async def check() -> None:
        async with LocalSandbox(settings) as sandbox:
            await check_isolation(sandbox)

    with ThreadPoolExecutor(1, "sandbox-check") as thread:
        thread.submit(asyncio.run, check()).result()


def memory_hog_input(limits: Settings) -> str:
    """Input of `MEMORY_HOG`: bytes per process, and the number of processes; empty if they cannot exceed the limit.

    A control group bounds the worker too. If few processes are allowed, each takes more memory, up to its own limit.
    """
    hog_mb = min(SMALL_MB, limits.memory_mb)
    total = math.ceil(EXCESS * (hog_mb + WORKER_MB + 4 * limits.files_mb))
    count = max(1, min(math.ceil(total / (hog_mb / 4)), limits.processes - 2))
    size = math.ceil(total / count)
    return f"{size << 20} {count}" if size <= USABLE * hog_mb else ""


class Canary:
    """A file, two listeners and a process on the host, which a program must neither reach nor harm."""

    def __init__(self) -> None:
        self.name = f"spo-canary-{secrets.token_hex(8)}"
        self.folder = tempfile.TemporaryDirectory(prefix="spo-canary-")
        # Readable for everyone, so that nothing but the sandbox keeps programs from reading it.
        os.chmod(self.folder.name, 0o755)
        self.file = Path(self.folder.name) / "file"
        self.file.write_text(self.name)
        self.file.chmod(0o644)
        self.listeners = [socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX)]
        self.listeners[1].bind("\0" + self.name)
        self.listeners[1].listen()
        self.process = subprocess.Popen(["sh", "-c", "read line", self.name], stdin=subprocess.PIPE)

    def __enter__(self) -> Canary:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()
        for listener in self.listeners:
            listener.close()
        self.folder.cleanup()

    def parameters(self) -> dict[str, Any]:
        """Names and addresses of file, listeners and process, for the program that tries to reach them."""
        files = ["/etc/shadow", str(self.file), str(Path.home() / ".bashrc"), str(Path.home() / ".ssh" / "known_hosts")]
        return {"name": self.name, "secrets": files, "port": self.listeners[0].getsockname()[1]}

    def harm(self) -> dict[str, str]:
        """What was changed, killed or reached, with the evidence."""
        harm = {}
        if self.file.read_text() != self.name:
            harm["host file"] = "it was changed"
        if self.process.poll() is not None:
            harm["host process"] = "it was killed"
        for listener in self.listeners:
            listener.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                listener.accept()[0].close()
                harm["host listener"] = "it was reached"
        return harm


def _successful_attempts(answer: RunCodeResponse) -> dict[str, str]:
    """The attempts that succeeded, with their evidence; raises `UserError` if not all were tried."""
    result = answer.run_result
    with contextlib.suppress(ValueError, TypeError):
        if result is not None and result.return_code == 0:
            return dict(json.loads(result.stdout or ""))
    reason = answer.message or (result and (result.stderr or result.status)) or "no answer"
    raise UserError(f"Python does not run in the sandbox: {reason[-300:]}; {OTHER_PYTHON}")


def advice(failure: str) -> str:
    """How to enable isolation on this machine, judged by the error and by the kernel's settings."""
    if "Can't find source path" in failure:
        return f"a folder cannot be reached by the user that programs run as; {OTHER_PYTHON}"
    for path, (off, fix) in SWITCHES.items():
        with contextlib.suppress(OSError):
            if Path(path).read_text().strip() == off:
                return f"user namespaces are off ({path} is {off}); switch them on: {fix}"
    return f"in a container, start it with {CONTAINER}; else see docs/sandbox.md"
