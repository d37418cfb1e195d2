"""CURVE keys of the weight socket: files as `zmq.auth.create_certificates` writes them."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import zmq
import zmq.auth
import zmq.utils.z85

from common.errors import UserError

NAMES = ("server", "client")
KEY_BYTES = 32


def make_keys(folder: str | Path) -> list[Path]:
    """Write a key pair for the learner (`server`) and one for all generators (`client`); returns the four files.

    The learner's machine needs `server.key_secret` and `client.key`; a generator's needs `client.key_secret` and
    `server.key`. The secret ones are readable by their owner only.

    Raises:
        UserError: keys are there already, or the folder cannot be written.
    """
    folder = Path(folder)
    files = [folder / f"{name}.{kind}" for name in NAMES for kind in ("key", "key_secret")]
    existing = [str(file) for file in files if os.path.exists(file)]
    if existing:
        raise UserError(f"{', '.join(existing)} exist already; remove them first, or give another folder")
    umask = os.umask(0o077)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in NAMES:
            zmq.auth.create_certificates(folder, name)
    except OSError as error:
        raise UserError(f"cannot write keys to {folder}: {error.strerror}") from None
    finally:
        os.umask(umask)
    return files


def public_key(folder: str | Path, name: str) -> bytes:
    """The public key of `server` or `client`, in Z85; raises `UserError`."""
    return _load(folder, f"{name}.key")[0]


def key_pair(folder: str | Path, name: str) -> tuple[bytes, bytes]:
    """Public and secret key of `server` or `client`, in Z85; raises `UserError`."""
    public, secret = _load(folder, f"{name}.key_secret")
    if secret is None:
        raise UserError(f"{Path(folder) / name}.key_secret holds no secret key; `spo keys DIR` makes a new set")
    return public, secret


def _load(folder: str | Path, file: str) -> tuple[bytes, bytes | None]:
    path = Path(folder) / file
    try:
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) if os.path.exists(path) else "there is no such file"
        raise _unusable(folder, path, reason) from None
    # ZeroMQ would refuse these later, with a message that does not name the file.
    if not all(map(_is_key, (public, secret) if secret is not None else (public,))):
        raise _unusable(folder, path)
    if secret is not None and zmq.curve_public(secret) != public:
        raise _unusable(folder, path, "its two keys are not a pair")
    return public, secret


def _is_key(text: bytes) -> bool:
    try:
        return len(zmq.utils.z85.decode(text)) == KEY_BYTES
    except (ValueError, KeyError, struct.error):
        return False


def _unusable(folder: str | Path, path: Path, reason: str | None = None) -> UserError:
    return UserError(
        f"learner.weights.curve_dir = {str(folder)!r}: cannot read the key {path} ({reason or 'it holds none'}); "
        "`spo keys DIR` makes a set"
    )
