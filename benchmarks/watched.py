"""Watches training runs from outside: when each step ended, and the CPU time of every process until then."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

SCRIPT = Path(__file__).with_name("grpo_trl.py")
ROLES = {"sampler.cli": "sampler", "generator.cli": "generator", "EngineCore": "generator", "learner.cli": "learner"}


@dataclass(frozen=True, slots=True)
class Point:
    """The end of a step.

    Attributes:
        time: Unix time.
        cpu: seconds so far, by process.
        reward: mean of the step's batch.
        tokens: mean of a response.
        no_signal: share of the samples whose advantage is 0.
        variance_ratio: what the baseline leaves of the rewards' variance, over the last 64 batches; None if not known.
    """

    time: float
    cpu: dict[str, float]
    reward: float
    tokens: float
    no_signal: float
    variance_ratio: float | None = None


def watch_spo(config: Path, metrics: Path, checkout: Path, overrides: Sequence[str], every: float) -> list[Point]:
    """The steps of a whole `spo run`; exits with the end of its log if it fails.

    Args:
        metrics: the file that the run will write.
        checkout: whose code runs.
        every: seconds between two looks at the CPU time.
    """
    command = [sys.executable, "-m", "launcher.cli", "run", str(config), "--plain", "--generators", "1"]
    command += [part for override in overrides for part in ("-o", override)]
    samples: list[tuple[float, dict[str, float]]] = []
    with config.with_suffix(".log").open("w+") as log:
        environment = os.environ | {"PYTHONPATH": str(checkout)}
        process = subprocess.Popen(command, cwd=checkout, env=environment, stdout=log, stderr=log)
        while process.poll() is None:
            samples.append((time.time(), _cpu_by_role(process.pid)))
            time.sleep(every)
        if process.returncode:
            log.seek(0)
            sys.exit(f"spo run ended with {process.returncode}:\n{log.read()[-3000:]}")
    sampler: dict[int, dict[str, float]] = {}
    points: list[Point] = []
    for line in metrics.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        values = entry["values"]
        if "reward/mean" in values:
            sampler[entry["version"]] = values
        if "actor/loss" in values:
            batch = sampler[entry["version"]]
            cpu = next(used for at, used in reversed(samples) if at <= entry["time"])
            signal = batch["reward/mean"], batch["response_length/mean"], batch["advantage/zero"]
            points.append(Point(entry["time"], cpu, *signal, batch.get("tracker/variance_ratio")))
    return points


def watch_trl(python: Path, settings: dict[str, Any], folder: Path) -> list[Point]:
    """The steps of TRL's GRPO; exits with the end of its log if it fails.

    Args:
        python: a Python in which TRL is installed.
        settings: what `benchmarks/grpo_trl.py` reads.
        folder: for its files.
    """
    settings_file, steps = folder / "settings.json", folder / "steps.jsonl"
    settings_file.write_text(json.dumps(settings), encoding="utf-8")
    steps.write_text("")
    with (folder / "trl.log").open("w+") as log:
        command = [str(python), str(SCRIPT), str(settings_file), str(steps)]
        if code := subprocess.run(command, cwd=folder, stdout=log, stderr=log, check=False).returncode:
            log.seek(0)
            sys.exit(f"TRL ended with {code}:\n{log.read()[-3000:]}")
    rows = map(json.loads, steps.read_text(encoding="utf-8").splitlines())
    return [Point(**row | {"cpu": {"trl": row["cpu"]}}) for row in rows]


def _cpu_by_role(launcher: int) -> dict[str, float]:
    """CPU seconds of the run's processes by role; vLLM's own are `engine`."""
    used: dict[str, float] = {}
    children: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        children = psutil.Process(launcher).children(recursive=True)
    for process in children:
        with contextlib.suppress(psutil.Error):  # it has ended since
            words = " ".join(process.cmdline())
            role = next((role for mark, role in ROLES.items() if mark in words), "redis" if "redis" in words else "")
            role = "engine" if "EngineCore" in words else role
            used[role] = used.get(role, 0.0) + sum(process.cpu_times()[:2])
    return used
