"""Caches the initial model of each quickstart task, so that a machine trains it once. Does not import torch."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from common.errors import UserError
from launcher.tasks.task import QuickstartTask

SOURCES = ("tiny_model.py", "warm_start.py")
Progress = Callable[[int, int, float], None]  # step, steps, loss


def cached_model(task: QuickstartTask, progress: Progress | None = None) -> Path:
    """The folder of the task's initial model, which is trained now unless it is cached; it appears whole or not at all.

    Raises:
        UserError: the cache folder, $XDG_CACHE_HOME/spo or ~/.cache/spo, cannot be written.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spo"
    folder = cache / f"warm-start-{key(task)}"
    if (folder / "config.json").exists():
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=cache))
    except OSError as error:
        raise UserError(
            f"cannot write the cache folder {cache} ({error.strerror}); set XDG_CACHE_HOME to a writable folder"
        ) from None
    try:
        _train_model(task, unfinished, progress)
        unfinished.chmod(0o755)
        _put(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _put(unfinished: Path, folder: Path) -> None:
    """Move a model into its place, unless another process was faster: its model is the same."""
    if not (folder / "config.json").exists():
        try:
            unfinished.rename(folder)
        except OSError:
            if not (folder / "config.json").exists():
                shutil.rmtree(folder, ignore_errors=True)  # what is left of a model that was partly removed
                unfinished.rename(folder)


def key(task: QuickstartTask) -> str:
    """The part of the folder's name that changes with the recipe and with the code that carries it out."""
    digest = hashlib.sha256(repr(sorted(asdict(task.recipe).items())).encode())
    for path in [*(Path(__file__).with_name(name) for name in SOURCES), *task.sources]:
        digest.update(path.read_bytes())
    return f"{task.model}-{digest.hexdigest()[:16]}"


def _train_model(task: QuickstartTask, folder: Path, progress: Progress | None) -> None:
    with _short_spins():
        import torch

    from launcher.quickstart import tiny_model
    from launcher.quickstart.warm_start import train

    # No other process of the run has started yet, so all cores are free, unless the environment says otherwise.
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    tokenizer = tiny_model.build_tokenizer(task.extra_tokens)
    with tempfile.TemporaryDirectory() as untrained:
        model = tiny_model.build_model(tokenizer, task.recipe.seed, experts=task.recipe.experts)
        tiny_model.save(model, tokenizer, Path(untrained))
        train(Path(untrained), folder, task, progress)


@contextmanager
def _short_spins() -> Iterator[None]:
    """Let torch's waiting threads sleep soon, unless the user has set when; torch reads this when it is imported.

    By default they spin. On a busy machine they then take cores from the threads that they wait for, and training takes
    at least twice as long; on an idle machine it takes the same time either way.
    """
    name = "GOMP_SPINCOUNT"
    if name in os.environ or "OMP_WAIT_POLICY" in os.environ:
        yield
        return
    os.environ[name] = "3000"
    try:
        yield
    finally:
        del os.environ[name]  # the run's processes choose for themselves
