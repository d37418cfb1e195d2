"""Where the initial model of a quickstart is kept, so that it is made once a machine. Imports no torch."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from common.errors import UserError
from launcher.tasks.room import Room

CODE = ("marks.py", "tiny_model.py", "warm_start.py")


def key(room: Room) -> str:
    """Name of the checkpoint's folder: changes with the recipe and with the code that follows it."""
    digest = hashlib.sha256(repr(sorted(asdict(room.recipe).items())).encode())
    for path in [*(Path(__file__).with_name(name) for name in CODE), *room.sources]:
        digest.update(path.read_bytes())
    return f"{room.name}-{digest.hexdigest()[:16]}"


def cache_folder() -> Path:
    """The user's cache: $XDG_CACHE_HOME/spo, or ~/.cache/spo."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spo"


def cached(room: Room, cache: Path) -> Path | None:
    """The finished checkpoint, if it is there."""
    folder = cache / f"warm-start-{key(room)}"
    return folder if (folder / "config.json").exists() else None


def warm_start(room: Room, cache: Path, progress: Callable[[int, int, float], None] | None = None) -> Path:
    """Make the checkpoint, or find it; it appears whole or not at all.

    Raises:
        UserError: the cache folder cannot be written.
    """
    folder = cached(room, cache)
    if folder is not None:
        return folder
    folder = cache / f"warm-start-{key(room)}"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=cache))
    except OSError as error:
        raise UserError(
            f"cannot write the cache folder {cache} ({error.strerror}); set XDG_CACHE_HOME to one that can be written"
        ) from None
    try:
        _make(room, unfinished, progress)
        unfinished.chmod(0o755)
        # A folder that is there is that of another process which was faster: the recipe makes them alike.
        if cached(room, cache) is None:
            unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _make(room: Room, folder: Path, progress: Callable[[int, int, float], None] | None) -> None:
    import torch

    from launcher import tiny_model
    from launcher.warm_start import train

    # Nothing else of the run is alive yet, so that all cores are free.
    torch.set_num_threads(os.cpu_count() or 1)
    tokenizer = tiny_model.build_tokenizer(room.pieces)
    model = tiny_model.build_model(tokenizer, room.recipe.seed)
    train(model, tokenizer, room, progress)
    tiny_model.save(model, tokenizer, folder)
