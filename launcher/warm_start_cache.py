"""Where the quickstart's initial model is kept, so that it is made once a machine. Imports no torch."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from common.errors import UserError

CODE = ("arithmetic.py", "tiny_model.py", "warm_start.py")


@dataclass(frozen=True, slots=True)
class Recipe:
    """What decides the checkpoint; a change of any value makes a new one."""

    seed: int = 0
    steps: int = 300
    rows: int = 128  # conversations a step
    lr: float = 3e-3
    warmup: int = 30  # steps
    tool_rows: float = 0.75  # part of the rows that use the tool: copying is what takes practice
    tool_share: float = 0.15  # how often the finished model will use it
    guess_error: float = 0.25  # guesses lie within this part of the answer

    def key(self) -> str:
        """Name of the checkpoint's folder: changes with the recipe and with the code that follows it."""
        digest = hashlib.sha256(repr(sorted(asdict(self).items())).encode())
        for name in CODE:
            digest.update(Path(__file__).with_name(name).read_bytes())
        return digest.hexdigest()[:16]


def cache_folder() -> Path:
    """The user's cache: $XDG_CACHE_HOME/spo, or ~/.cache/spo."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spo"


def cached(recipe: Recipe, cache: Path) -> Path | None:
    """The finished checkpoint, if it is there."""
    folder = cache / f"warm-start-{recipe.key()}"
    return folder if (folder / "config.json").exists() else None


def warm_start(recipe: Recipe, cache: Path, progress: Callable[[int, int, float], None] | None = None) -> Path:
    """Make the checkpoint, or find it; it appears whole or not at all.

    Raises:
        UserError: the cache folder cannot be written.
    """
    folder = cached(recipe, cache)
    if folder is not None:
        return folder
    folder = cache / f"warm-start-{recipe.key()}"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=cache))
    except OSError as error:
        raise UserError(
            f"cannot write the cache folder {cache} ({error.strerror}); set XDG_CACHE_HOME to one that can be written"
        ) from None
    try:
        _make(recipe, unfinished, progress)
        unfinished.chmod(0o755)
        # A folder that is there is that of another process which was faster: the recipe makes them alike.
        if cached(recipe, cache) is None:
            unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _make(recipe: Recipe, folder: Path, progress: Callable[[int, int, float], None] | None) -> None:
    import torch

    from launcher import tiny_model
    from launcher.warm_start import train

    # Nothing else of the run is alive yet, so that all cores are free.
    torch.set_num_threads(os.cpu_count() or 1)
    tokenizer = tiny_model.build_tokenizer()
    model = tiny_model.build_model(tokenizer, recipe.seed)
    train(model, tokenizer, recipe, progress)
    tiny_model.save(model, tokenizer, folder)
