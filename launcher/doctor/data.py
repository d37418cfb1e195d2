"""The sampler's data files."""

from __future__ import annotations

from pathlib import Path

from common.config import Config
from common.preflight.context import Context
from common.preflight.finding import Finding, ok, problem
from common.role import Role


def data(context: Context, config: Config) -> Finding | None:
    """Whether the files with prompts exist and are not empty."""
    if context.role is not Role.SAMPLER:
        return None
    sources = {"data.train": config.data.train, "data.heldout": config.data.heldout}
    for key, source in sources.items():
        # Any other name is a dataset of the Hugging Face hub.
        if source is None or Path(source).suffix not in (".jsonl", ".parquet"):
            continue
        reason = _unreadable(Path(source))
        if reason:
            return problem("data", f"{key} = {source!r}: {reason}; mount it, or set {key}")
    return ok("data", ", ".join(source for source in sources.values() if source is not None))


def _unreadable(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return None if file.read(1) else "the file is empty"
    except OSError as error:
        return error.strerror or str(error)
