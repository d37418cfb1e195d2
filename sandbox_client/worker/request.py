"""A request as a worker sees it: checked, decoded, and refused with a reason if it cannot be run."""

from __future__ import annotations

import base64
import binascii
import posixpath
from dataclasses import dataclass
from typing import Any

from sandbox_client.settings import Limits

PROGRAMS = {"python": "program.py", "bash": "program.sh"}
DEPTH = 32
LENGTH = 1024


class Refused(Exception):
    """The request cannot be run; the message says why."""


@dataclass(frozen=True)
class Request:
    """What to run. `files` and `fetch` name paths inside the work folder; `fetch` maps them to the caller's names."""

    language: str
    stdin: bytes
    files: dict[str, bytes]
    fetch: dict[str, str]
    seconds: float
    memory: int


def check(values: dict[str, Any], limits: Limits, folder: str) -> Request:
    """Decode and check a `RunCodeRequest`; memory and time are cut to the limits.

    Raises:
        Refused: the language is not known, or a file cannot be placed or fetched.
    """
    language = values["language"]
    if language not in PROGRAMS:
        raise Refused(f"language {language[:50]!r} is not supported; this sandbox runs {' and '.join(PROGRAMS)}")
    if max(len(values["files"]), len(values["fetch_files"])) > limits.files:
        raise Refused(
            f"{len(values['files'])} files, {len(values['fetch_files'])} to fetch; at most {limits.files} each"
        )
    files = {inside(path, folder): decode(path, data) for path, data in values["files"].items() if data is not None}
    size = sum(map(len, files.values()))
    if size > limits.files_mb << 20:
        raise Refused(f"files of {size} bytes; at most {limits.files_mb} MB")
    if PROGRAMS[language] in files:
        raise Refused(f"file {PROGRAMS[language]!r} has the name of the program itself")
    files[PROGRAMS[language]] = values["code"].encode()
    for path in files:
        parent = path
        while parent := posixpath.dirname(parent):
            if parent in files:
                raise Refused(f"file {parent[:100]!r} is also the folder of {path[:100]!r}")
    return Request(
        language=language,
        stdin=(values["stdin"] or "").encode(),
        files=files,
        fetch={inside(path, folder): path for path in values["fetch_files"]},
        seconds=min(values["run_timeout"] or limits.seconds, limits.seconds),  # JSON has null for infinity
        memory=min(values["memory_limit_MB"], limits.memory_mb) << 20,
    )


def inside(path: str, folder: str) -> str:
    """The path relative to the work folder, without detours.

    Raises:
        Refused: it leads out of the folder, or is no path.
    """
    shown = repr(path[:100])
    if path.startswith("/"):
        if not path.startswith(folder + "/"):
            raise Refused(f"file {shown} is outside the work folder {folder}")
        path = path[len(folder) :]
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise Refused(f"file {shown} leads out of the work folder")
    if not parts or path.endswith("/") or "\0" in path:
        raise Refused(f"file {shown} is no file name")
    if len(parts) > DEPTH or any(len(part.encode()) > 255 for part in parts) or len(path.encode()) > LENGTH:
        raise Refused(f"file {shown} is too long; at most {LENGTH} bytes, {DEPTH} folders, and 255 bytes a name")
    return "/".join(parts)


def decode(path: str, data: str) -> bytes:
    """The bytes of a file; raises `Refused` if they are not base64."""
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise Refused(f"file {path[:100]!r} is not base64") from None
