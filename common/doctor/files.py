"""Folders and files a run names: its output, its data, its secrets."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from common.config import Config
from common.doctor.case import Case, mib
from common.doctor.finding import Finding, ok, problem, warning
from common.doctor.model import size_of
from common.errors import UserError
from common.role import Role
from common.secret import read_secret

# A float32 copy of the weights and AdamW's two moments, and the model itself as it was stored.
CHECKPOINT = 12
LEAST = 64 << 20  # bytes free, for logs and metrics
FILES = {Role.SANDBOX: 2048}
FILES_DEFAULT = 1024


def output(case: Case, config: Config) -> Finding | None:
    """Whether the run folder can be written."""
    if case.role in (Role.RELAY, Role.SANDBOX):
        return None
    folder, name = config.run.folder, "output"
    there = next(above for above in (folder, *folder.absolute().parents) if above.exists())
    try:
        if not there.is_dir():
            raise NotADirectoryError(0, "Not a directory")
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        who = f"user {os.getuid()}"
        return problem(
            name,
            f"run folder {folder}: {who} cannot write in {there} ({error.strerror}); give it to that user, or set "
            "run.output_dir",
        )
    return ok(name, f"{folder} can be written")


def disk(case: Case, config: Config) -> Finding | None:
    """Whether there is room for the run's checkpoints."""
    if case.role is not Role.LEARNER:
        return None
    folder, name = config.run.folder, "disk"
    there = next(above for above in (folder, *folder.absolute().parents) if above.is_dir())
    free, size = shutil.disk_usage(there).free, size_of(Path(config.model.path))
    if free < LEAST:
        return problem(name, f"{mib(free)} are free at {there}; make room, or set run.output_dir")
    if size is None:
        return ok(name, f"{mib(free)} are free")
    one = CHECKPOINT * size.parameters + size.stored
    # The new one is complete before an old one goes.
    needed = (config.learner.keep_checkpoints + 1) * one
    if free < needed:
        return warning(
            name,
            f"{mib(free)} are free at {there}, and up to {config.learner.keep_checkpoints + 1} checkpoints of about "
            f"{mib(one)} are kept at a time: make room, or lower learner.keep_checkpoints",
        )
    return ok(name, f"{mib(free)} are free, a checkpoint takes about {mib(one)}")


def data(case: Case, config: Config) -> Finding | None:
    """Whether the files with prompts are there."""
    if case.role is not Role.SAMPLER:
        return None
    sources = {"data.train": config.data.train, "data.heldout": config.data.heldout}
    named = {key: source for key, source in sources.items() if source is not None}
    for key, source in named.items():
        path = Path(source)
        if path.suffix not in (".jsonl", ".parquet"):
            continue
        trouble = _unreadable(path)
        if trouble:
            return problem("data", f"{key} = {source!r}: {trouble}; mount it, or set {key}")
    return ok("data", ", ".join(named.values()))


def secrets(case: Case, config: Config) -> Finding | None:
    """Whether the files with the password and the token can be read and hold something."""
    read = []
    for key, path in _secret_files(case, config):
        try:
            read_secret(path, key)
        except UserError as error:
            return problem("secrets", f"{error}; docker/make-secrets makes those of compose.yaml")
        read.append(key)
    return ok("secrets", f"{' and '.join(read)} can be read") if read else None


def open_files(case: Case) -> Finding:
    """Whether the process may hold enough files and connections."""
    least = FILES.get(case.role, FILES_DEFAULT)
    if case.role is Role.GENERATOR and case.config is not None:
        least = max(least, 512 + 4 * case.config.generator.max_concurrency)
    limit = case.machine.open_files
    if limit < least:
        return warning("open files", f"ulimit -n is {limit}; {least} are wanted: raise it (docker: ulimits, nofile)")
    shown = "no limit" if limit > 1 << 40 else str(limit)
    return ok("open files", shown)


def _secret_files(case: Case, config: Config) -> Iterator[tuple[str, str]]:
    if case.role is not Role.SANDBOX and config.broker.password_file is not None:
        yield "broker.password_file", config.broker.password_file
    if case.role is Role.GENERATOR and config.sandbox.token_file is not None:
        yield "sandbox.token_file", config.sandbox.token_file


def _unreadable(path: Path) -> str | None:
    try:
        with path.open("rb") as opened:
            return None if opened.read(1) else "the file is empty"
    except OSError as error:
        return error.strerror or str(error)
