"""The files with prompts."""

from __future__ import annotations

from pathlib import Path

from common.config import Config
from common.config.data import FILES, NOT_READ
from common.config.known_sets import misspelt_set
from common.files import near_file
from common.preflight.context import Context
from common.preflight.finding import Finding, ok, problem
from common.process import Role


def data(context: Context, config: Config) -> Finding | None:
    """Whether the files with prompts exist and are not empty."""
    if context.role is not Role.SAMPLER:
        return None
    sources = [*config.data.sources("train"), *config.data.sources("heldout")]
    for source in sources:
        near = misspelt_set(source.path)
        if near is not None:
            return problem(
                "data", f"{source.key} = {source.path!r} is no file, no folder and no known set; did you mean {near}?"
            )
        if Path(source.path).suffix in NOT_READ:
            return problem(
                "data", f"{source.key} = {source.path!r}: give a file *.jsonl, a JSON object a line, or *.parquet"
            )
        # Any other name is a dataset of the Hugging Face hub.
        reason = _unreadable(Path(source.path)) if Path(source.path).suffix in FILES else None
        if reason:
            return problem("data", f"{source.key} = {source.path!r}: {reason}")
    return ok("data", ", ".join(source.shown() for source in sources))


def _unreadable(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return None if file.read(1) else "the file is empty"
    except FileNotFoundError:
        return f"there is no such file{near_file(path, FILES)}"
    except OSError as error:
        return error.strerror or str(error)
