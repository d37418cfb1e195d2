"""Turns a request into a program that can be run, or refuses it with a reason."""

from __future__ import annotations

import base64
import binascii
import posixpath
from dataclasses import dataclass
from typing import Any

from sandbox_client.worker.protocol import ProgramLimits

FILE_NAMES = {"python": "program.py", "bash": "program.sh"}
MOST_FOLDERS = 32
LONGEST_PATH = 1024


class CannotRun(Exception):
    """The request cannot be run; the message says why."""


@dataclass(frozen=True)
class Program:
    """A program to run.

    Attributes:
        files: content by path inside the work folder, the program's own file among them.
        fetch: the caller's name of each file to fetch, by its path inside the work folder.
        memory: bytes.
    """

    language: str
    stdin: bytes
    files: dict[str, bytes]
    fetch: dict[str, str]
    seconds: float
    memory: int


def check(values: dict[str, Any], limits: ProgramLimits, folder: str) -> Program:
    """Check and decode a `RunCodeRequest`; memory and time are cut to the limits.

    Raises:
        CannotRun: the language is not known, or a file cannot be placed or fetched.
    """
    language = values["language"]
    if language not in FILE_NAMES:
        raise CannotRun(f"language {language[:50]!r} is not supported; this sandbox runs {' and '.join(FILE_NAMES)}")
    if max(len(values["files"]), len(values["fetch_files"])) > limits.files:
        raise CannotRun(
            f"{len(values['files'])} files, {len(values['fetch_files'])} to fetch; at most {limits.files} each"
        )
    files = {inside(path, folder): _decode(path, data) for path, data in values["files"].items() if data is not None}
    size = sum(map(len, files.values()))
    if size > limits.files_mb << 20:
        raise CannotRun(f"files of {size} bytes; at most {limits.files_mb} MB")
    if FILE_NAMES[language] in files:
        raise CannotRun(f"file {FILE_NAMES[language]!r} has the name of the program itself")
    files[FILE_NAMES[language]] = values["code"].encode()
    for path in files:
        parent = path
        while parent := posixpath.dirname(parent):
            if parent in files:
                raise CannotRun(f"file {parent[:100]!r} is also the folder of {path[:100]!r}")
    return Program(
        language=language,
        stdin=(values["stdin"] or "").encode(),
        files=files,
        fetch={inside(path, folder): path for path in values["fetch_files"]},
        seconds=min(values["run_timeout"] or limits.seconds, limits.seconds),  # pydantic writes infinity as null
        memory=min(values["memory_limit_MB"], limits.memory_mb) << 20,
    )


def inside(path: str, folder: str) -> str:
    """The path relative to the work folder, without detours; raises `CannotRun` if it leads out or is not a path."""
    shown = repr(path[:100])
    if path.startswith("/"):
        if not path.startswith(folder + "/"):
            raise CannotRun(f"file {shown} is outside the work folder {folder}")
        path = path[len(folder) :]
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise CannotRun(f"file {shown} leads out of the work folder")
    if not parts or path.endswith("/") or "\0" in path:
        raise CannotRun(f"file {shown} is not a file name")
    longest_part = max(len(part.encode()) for part in parts)
    if len(parts) > MOST_FOLDERS or longest_part > 255 or len(path.encode()) > LONGEST_PATH:
        raise CannotRun(
            f"file {shown} is too long; at most {LONGEST_PATH} bytes, {MOST_FOLDERS} folders, and 255 bytes a name"
        )
    return "/".join(parts)


def _decode(path: str, data: str) -> bytes:
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise CannotRun(f"file {path[:100]!r} is not base64") from None
