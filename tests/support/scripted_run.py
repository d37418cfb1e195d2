"""Runs whose processes are small scripts, on a real Redis."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog

from launcher.layout.layout import Choice
from launcher.quickstart import inputs
from launcher.run import local_run
from launcher.run.display import PlainView
from launcher.run.local_run import RunOptions, run_here
from launcher.run.progress import PhaseTimer
from launcher.run.summary import Summary

# What each process does. A script that names `broker` or `config` begins with HEAD, whose imports take a second.
FOREVER = "time.sleep(600)"
UNTIL_FINISHED = "while not os.path.exists(sys.argv[1] + '.over'): time.sleep(0.01)"
SAVE = """
folder = os.path.join(os.path.dirname(sys.argv[1]), "checkpoints", "step_3")
os.makedirs(folder, exist_ok=True)
open(os.path.join(folder, "checkpoint.json"), "w")
"""
EVALUATE = """
for version, accuracy in ((0, 0.2), (3, 0.9)):
    result = msgpack.packb({"version": version, "accuracy": accuracy, "samples": 8})
    broker.redis.hset(broker.key("evaluations"), version, result)
broker.finish()
open(sys.argv[1] + ".over", "w")
"""
HEAD = """
import msgpack
from common.config import load_config
from common.streams.agreement import agree
from common.streams.broker import connect
config = load_config(sys.argv[1])
broker = connect(config.broker, config.run.name)
"""
LOG = structlog.get_logger()


def scripts(bodies: dict[str, str]) -> Callable[[Path, object], dict[str, list[str]]]:
    """Commands of processes that run these scripts."""

    def command(name: str, body: str, path: Path) -> list[str]:
        head = HEAD if "broker" in body or "config" in body else ""
        return [sys.executable, "-c", f"import os, sys, time\n{head}{body}", str(path), name]

    return lambda path, _: {name: command(name, body, path) for name, body in bodies.items()}


def bell(path: Path) -> Path:
    """A pipe by name: opening it waits for the other end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(path)
    return path


def when_opened(pipe: Path, action: Callable[[], object]) -> None:
    """Do something in a thread once a process has opened the pipe."""

    def wait_and_act() -> None:
        pipe.read_text()
        action()

    threading.Thread(target=wait_and_act, daemon=True).start()


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


class Scripted:
    """A run of three steps whose processes run scripts."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> None:
        self.config = inputs.quickstart_config(folder / "quickstart-1", seed=0, steps=3, overrides=overrides)
        self.folder, self.monkeypatch = self.config.run.folder, monkeypatch

    def plays(self, sampler: str, others: str = UNTIL_FINISHED, **more: str) -> None:
        """Let each process run a script; the learner also writes its last checkpoint."""
        bodies = {"learner": f"{others}\n{SAVE}", "generator-1": others, "sampler": sampler, **more}
        self.monkeypatch.setattr(local_run, "worker_commands", scripts(bodies))
        (self.folder / "config.yaml.over").unlink(missing_ok=True)

    def start(self, redis: str = "embedded", view: Callable[[Any], PlainView] = PlainView, **options: Any) -> Summary:
        # No check of the machine: the processes are scripts.
        chosen = RunOptions(Choice(1), redis, check=lambda _: None, **options)
        return run_here(self.config, chosen, lambda: view(LOG), LOG, PhaseTimer())

    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())
