"""Files and folders that a process needs from its start: the run folder and its secrets."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

from common.config import Config
from common.errors import UserError
from common.files import read_secret
from common.preflight.context import Context
from common.preflight.finding import Finding, ok, problem
from common.process import Role


def run_folder(context: Context, config: Config) -> Finding | None:
    """Whether this process can write to the run folder."""
    if context.role in (Role.RELAY, Role.SANDBOX):
        return None
    folder, name = config.run.folder, "output"
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    try:
        if not existing.is_dir():
            raise NotADirectoryError(0, "Not a directory")
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        return problem(
            name,
            f"run folder {folder}: user {os.getuid()} cannot write in {existing} ({error.strerror}); give it to that "
            "user, or set run.output_dir",
        )
    return ok(name, f"{folder} can be written")


def secrets(context: Context, config: Config) -> Finding | None:
    """Whether the files with the password and the token can be read and are not empty."""
    read = []
    for key, path in _secret_files(context.role, config):
        try:
            read_secret(path, key)
        except UserError as error:
            return problem("secrets", f"{error}; docker/make-secrets makes those of compose.yaml")
        read.append(key)
    return ok("secrets", f"{' and '.join(read)} can be read") if read else None


def _secret_files(role: Role, config: Config) -> Iterator[tuple[str, str]]:
    if role is not Role.SANDBOX and config.broker.password_file is not None:
        yield "broker.password_file", config.broker.password_file
    if role is Role.GENERATOR and config.sandbox.token_file is not None:
        yield "sandbox.token_file", config.sandbox.token_file
