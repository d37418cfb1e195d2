"""A file that a name which is not there may have been meant for."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from pathlib import Path


def near_file(path: Path, suffixes: Collection[str]) -> str:
    """What to add to "does not exist", from the folder's own files of these suffixes; may be empty."""
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.suffix in suffixes]
    except OSError:
        return f": there is no folder {path.parent}"
    near = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {path.parent / near[0]}?" if near else ""
