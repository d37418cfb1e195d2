"""Versions of packages and machines: each process writes its own to `versions.jsonl` when it joins a run."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from importlib.metadata import requires
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from redis.exceptions import RedisError

from common.checks.machine import installed_version
from common.errors import UserError
from common.release import PROJECT, SOURCE, release
from common.streams.broker import Broker

FILE = "versions.jsonl"


def record_versions(folder: Path, process: str, broker: Broker) -> None:
    """Append a line on this process's machine and versions; raises `UserError` if the run folder cannot be written."""
    line = json.dumps({"time": time.time(), "process": process, **versions(broker)}) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # One write at the end of the file: lines of processes that start together do not mix.
        with (folder / FILE).open("ab", buffering=0) as file:
            file.write(line.encode())
    except OSError as error:
        raise UserError(f"run folder {folder} cannot be written: {error.strerror}") from None


def versions(broker: Broker) -> dict[str, Any]:
    """`python`, `platform`, `cores`, `gpus`, `redis_server`, `release`, `commit`, and `packages` SPO asks for."""
    requirements = [Requirement(line) for line in requires(PROJECT) or []]
    for_runs = (one for one in requirements if one.marker is None or not one.marker.evaluate({"extra": "dev"}))
    names = sorted({PROJECT, *(requirement.name for requirement in for_runs)})
    packages = {name: installed for name in names if (installed := installed_version(name)) is not None}
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)),
        "gpus": _gpus(),
        "redis_server": _redis_server(broker),
        "release": release(),
        "commit": _commit(),
        "packages": packages,
    }


def _gpus(root: Path = Path("/proc/driver/nvidia/gpus")) -> list[str]:
    """Models of the NVIDIA GPUs of this machine, as the driver names them."""
    lines = [line for path in sorted(root.glob("*/information")) for line in path.read_text().splitlines()]
    return [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]


def _redis_server(broker: Broker) -> str | None:
    try:
        return broker.redis.info("server").get("redis_version")
    except RedisError:
        return None  # an account that may not ask


def _commit() -> str | None:
    """Commit of the checkout that SPO runs from, with `-dirty` if files differ from it; None outside of a checkout."""
    if not (SOURCE / ".git").exists():
        return None
    command = ["git", "-C", str(SOURCE), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None
