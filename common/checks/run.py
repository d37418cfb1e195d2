"""Checks of what a configuration names: steps, data, the run folder, secrets, and the weights' keys and port."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from common.checks.check import Context, Finding, Need, ok, problem, warning
from common.config import Source
from common.config.data import FILES, NOT_READ, matching_files, misspelt_set
from common.config.warnings import warnings
from common.errors import UserError
from common.files import near_file, read_secret
from common.health import alive
from common.process import Role

# Names of the key pair a role owns, and of the pair whose public key it needs.
KEYS = {Role.LEARNER: ("server", "client"), Role.GENERATOR: ("client", "server"), Role.RELAY: ("client", "server")}


def learner_steps(context: Context) -> Finding | None:
    """Whether the run has a learner, which this process needs."""
    if context.config.run.has_learner:
        return None
    return problem(
        f"run.steps = 0 is a run without a learner, which needs no {context.role}; set it to 1 or "
        "more, or use `spo values estimate` or `spo eval`, which need generators only"
    )


def settings(context: Context) -> Iterator[Finding]:
    """Settings without effect, or with less than they promise."""
    return (warning(line) for line in warnings(context.config))


def data(context: Context) -> Finding:
    """Whether the files with prompts exist and are not empty."""
    data = context.config.data
    sources = data.all_sources()
    problems = [f"{source.key} = {_named(source)!r}{reason}" for source in sources if (reason := _unusable(source))]
    return problem("; ".join(problems)) if problems else ok(", ".join(source.shown() for source in sources))


def _named(source: Source) -> str:
    return source.path if isinstance(source.path, str) else ", ".join(source.path)


def _unusable(source: Source) -> str | None:
    try:
        files = matching_files(source.path)
    except UserError as error:
        return f": {error}"
    return next(filter(None, (_unusable_file(file, several=files != [source.path]) for file in files)), None)


def _unusable_file(name: str, several: bool) -> str | None:
    """Why a path cannot be read as a file; None if it can, or if it is a name on the Hugging Face hub.

    Args:
        several: whether it is one of several files, each of which must exist.
    """
    path, named = Path(name), f" ({name})" * several
    near = misspelt_set(name)
    if several and path.suffix not in FILES:
        return (
            f"{named}: only files *.jsonl and *.parquet can be read together; give other data sets as a list of "
            "sources, [{path: …}, …]"
        )
    if near is not None:
        return f" is neither a file, a folder nor a known set; did you mean {near}?"
    if path.suffix in NOT_READ:
        return f"{named}: give a file *.jsonl, with one JSON object per line, or *.parquet"
    if path.suffix not in FILES:
        return None  # a dataset of the Hugging Face hub
    try:
        with path.open("rb") as file:
            return None if file.read(1) else f"{named}: the file is empty"
    except FileNotFoundError:
        return f"{named}: there is no such file{near_file(path, FILES)}"
    except OSError as error:
        return f"{named}: {error.strerror or error}"


def run_folder(context: Context) -> Finding:
    """Whether this process can write to the run folder."""
    folder = context.config.run.folder
    existing = next(parent for parent in (folder, *folder.absolute().parents) if os.path.exists(parent))
    try:
        if not existing.is_dir():
            raise NotADirectoryError(0, "Not a directory")
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        return problem(
            f"run folder {folder}: user {os.getuid()} cannot write in {existing} ({error.strerror}); give it to that "
            "user, or set run.output_dir"
        )
    return ok(f"{folder} can be written")


def secrets(context: Context) -> Finding | None:
    """Whether the files with the password and the token can be read and are not empty."""
    files = {"broker.password_file": context.config.broker.password_file}
    if context.role is Role.GENERATOR:
        files["sandbox.token_file"] = context.config.sandbox.token_file
    named = {key: path for key, path in files.items() if path is not None}
    for key, path in named.items():
        try:
            read_secret(path, key)
        except UserError as error:
            return problem(f"{error}; docker/make-secrets makes those of compose.yaml")
    return ok(f"{' and '.join(named)} can be read") if named else None


def keys(context: Context) -> Finding | None:
    """Whether the CURVE keys this role needs exist and are well-formed."""
    folder = context.config.learner.weights.curve_dir
    if folder is None:
        return None
    # Imports pyzmq, which not every role has.
    from common.curve import key_pair, public_key

    own, other = KEYS[context.role]
    key_pair(folder, own)
    public_key(folder, other)
    return ok(f"{Path(folder) / own}.key_secret and {other}.key")


def port(context: Context) -> Finding | None:
    """Whether the learner can bind the address that it will serve weights on."""
    bind = context.config.learner.weights.bind
    if not context.serves_weights:
        return None
    if bind.endswith(":*"):
        return ok(f"{bind}: any free port")
    from common.weights.listener import check_address

    try:
        check_address(bind)
    except UserError:
        if Need.REDIS in context.available and _learner_is_here(context):
            return ok(f"{bind} is served by this run's learner")
        raise
    return ok(f"{bind} is free")


def _learner_is_here(context: Context) -> bool:
    try:
        return alive(context.config, Role.LEARNER, socket.gethostname())
    except UserError:  # Redis cannot be reached
        return False
