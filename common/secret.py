"""Secrets in files, as container platforms provide them."""

from __future__ import annotations

import re
from pathlib import Path

from common.errors import UserError


def read_secret(path: str | Path, key: str) -> str:
    """The one line of a file, without white space around it.

    Args:
        path: the file.
        key: what named it, for messages: `broker.password_file`, `--token-file`.

    Raises:
        UserError: the file cannot be read, or is empty.
    """
    try:
        secret = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a UTF-8 text file"
        raise UserError(f"cannot read {key} {path}: {reason}") from None
    if not secret:
        raise UserError(f"{key} {path} is empty; it holds the secret, on one line")
    return secret


def without_password(url: str) -> str:
    """An address as it may be shown: its password is replaced by stars, also where the address is malformed."""
    return re.sub(r"([?&](?:ssl_)?password=)[^&]*", r"\1***", re.sub(r"(://[^:@/]*):.*@", r"\1:***@", url))
