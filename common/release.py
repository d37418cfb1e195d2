"""The release of SPO that a process runs: the version, and a digest of the code, which differs between checkouts."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.metadata import version
from pathlib import Path

PROJECT = "spo-trainer"
SOURCE = Path(__file__).resolve().parents[1]
# What the processes of a run execute. The launcher is not among them: it may be newer.
PACKAGES = ("common", "sampler", "generator", "learner", "relay", "sandbox_client")
DIGITS = 8  # of the digest


@cache
def release() -> str:
    """For example `0.1.0+1a2b3c4d`; the same for an installed package and the checkout that it was made from."""
    return f"{version(PROJECT)}+{code_digest(SOURCE)}"


def code_digest(root: Path) -> str:
    """A digest of the names and contents of all source files in the packages of this folder."""
    digest = hashlib.sha256()
    files = [path for name in PACKAGES for kind in ("*.py", "*.lua") for path in (root / name).rglob(kind)]
    for name, path in sorted((path.relative_to(root).as_posix(), path) for path in files):
        content = path.read_bytes()
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:DIGITS]
