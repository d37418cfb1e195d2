"""A running `spo-sandbox`, and what its programs leave behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import psutil

from sandbox_client import RunCodeRequest, RunCodeResponse, Sandbox

FOREVER = "import time; time.sleep(1000)"


class SandboxServer:
    """A running `spo-sandbox` with settings like `workers=1`."""

    def __init__(self, *settings: str, token: str | None = None, **environment: str) -> None:
        options = [word for setting in settings for word in ("-o", setting)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sandbox_client.cli", "--port", "0", *options],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "SPO_LOG": "json", **({"SPO_SANDBOX_TOKEN": token} if token else {}), **environment},
        )
        self.log: list[dict[str, Any]] = []
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with contextlib.suppress(ValueError):
                self.log.append(json.loads(line))
            if self.log and self.log[-1]["event"] == "listening":
                break
        else:
            raise AssertionError(f"spo-sandbox ended with {self.process.wait()}")
        self.url = f"http://127.0.0.1:{self.log[-1]['port']}"

    def stop(self) -> int:
        self.process.terminate()
        assert self.process.stderr is not None
        with self.process.stderr:
            self.log += [json.loads(line) for line in self.process.stderr if line.startswith("{")]
        return self.process.wait(timeout=600)


def workers_of(pid: int) -> list[psutil.Process]:
    """The sandbox's workers; a process's children are their keepers, and may be zombies of other tests."""
    workers = []
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "sandbox_client.worker" in " ".join(child.cmdline()):
                workers += child.children()
    return workers


def programs_of(pid: int) -> list[psutil.Process]:
    """All processes that the sandbox workers among a process's children have started."""
    return [process for worker in workers_of(pid) for process in worker.children(recursive=True)]


@dataclass
class SandboxUnderTest:
    """A sandbox in an event loop of its own, and the process whose grandchildren its programs are."""

    sandbox: Sandbox
    pid: int
    loop: asyncio.Runner

    def run(self, request: RunCodeRequest) -> RunCodeResponse:
        return self.run_all([request])[0]

    def run_all(self, requests: Iterable[RunCodeRequest]) -> list[RunCodeResponse]:
        async def gather() -> list[RunCodeResponse]:
            return await asyncio.gather(*map(self.sandbox.run_code, requests))

        return self.loop.run(gather())
