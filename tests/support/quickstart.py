"""`spo quickstart` as a process of its own, one of whose processes is killed in the middle."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common.streams.broker import Broker
from common.streams.steps import StepReader


@contextmanager
def started_quickstart(
    folder: Path, redis: str, settings: Mapping[str, Any], *more: str, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[str]]:
    """The command with one generator; it logs to `quickstart.log`, its run folder is made in `runs`."""
    overrides = [text for name, value in settings.items() for text in ("-o", f"{name}={value}")]
    command = [sys.executable, "-m", "launcher.cli", "quickstart", "--plain", "--generators", "1", "--redis", redis]
    command += ["--output", str(folder / "runs"), *more, *overrides]
    with (folder / "quickstart.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, text=True, env=os.environ | environment)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(timeout=30)


def wait_for_version(broker: Broker, version: int, process: subprocess.Popen[str]) -> None:
    """Until the learner has announced a version; fails if the command has ended before."""
    reader = StepReader(broker)
    while not any(step.version >= version for step in reader.read(block_ms=500)):
        assert process.poll() is None, "the run ended early"


def kill(broker: Broker, role: str) -> None:
    """SIGKILL the only process of a role, as its heartbeat names it."""
    (pid,) = [process["pid"] for process in broker.processes().values() if process["role"] == role]
    os.kill(pid, signal.SIGKILL)


def ends_with_each_task_counted_once(
    process: subprocess.Popen[str], broker: Broker, folder: Path, trained_on: int
) -> dict[str, int]:
    """The counters of a quickstart that has come to its end, after checking that its books balance."""
    assert process.wait(timeout=400) == 0, (folder / "quickstart.log").read_text()[-3000:]
    counters = broker.counters()
    assert counters["dispatched"] == counters["counted"] == counters["finished"]
    assert counters["batched"] == trained_on
    return counters
