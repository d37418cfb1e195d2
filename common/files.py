"""Paths of a run's checkpoints, secrets, writes that survive a crash, temporary folders, hints for misspelt names."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import math
import os
import shutil
import tempfile
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from common.errors import UserError, nearest

METADATA = "checkpoint.json"  # written last: a checkpoint that has it is complete
STEP = "step_"
SOCKET_PATH = 107  # bytes: the longest path of a Unix socket
SOCKET_ROOM = 64  # bytes for the names of this process's folder and of a socket in it, such as vLLM's (36 bytes)
SHORT_FOLDERS = ("/tmp", "/dev/shm")


def checkpoints(run_folder: Path) -> Path:
    return run_folder / "checkpoints"


def checkpoint(run_folder: Path, version: int) -> Path:
    return checkpoints(run_folder) / f"{STEP}{version}"


def checkpoint_versions(run_folder: Path) -> list[int]:
    """Versions of the complete checkpoints, ascending."""
    names = (path.parent.name.removeprefix(STEP) for path in checkpoints(run_folder).glob(f"{STEP}*/{METADATA}"))
    return sorted(int(name) for name in names if name.isdigit())


def best_version(versions: Iterable[int], rewards: Mapping[int, float]) -> int | None:
    """The version with the highest mean held-out reward, the newest of equal ones; None if none has a reward."""
    evaluated = [version for version in versions if not math.isnan(rewards.get(version, math.nan))]
    return max(evaluated, key=lambda version: (rewards[version], version), default=None)


def tracker_path(run_folder: Path, version: int) -> Path:
    """File of the sampler's state that belongs to a checkpoint: the sampler writes it, the learner looks for it."""
    return checkpoints(run_folder) / "tracker" / f"{STEP}{version}.npz"


def tracker_is_whole(path: Path) -> bool:
    """True if the file of the sampler's state is there, and its contents agree with their checksums."""
    try:
        with zipfile.ZipFile(path) as file:
            return file.testzip() is None
    except (OSError, ValueError, EOFError, RuntimeError, zlib.error, zipfile.BadZipFile):
        return False


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to the disk, so that created, renamed or removed files survive a crash."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@functools.cache
def own_folder() -> Path:
    """This process's folder among the temporary files: removed at its end or, if it is killed, by a later process.

    It stays locked as long as this process, or one that it forked, lives.
    """
    return _own_folder(tempfile.gettempdir())


@functools.cache
def socket_folder() -> Path:
    """Like `own_folder`, for Unix sockets: its path is short, however long that of TMPDIR is."""
    short = short_temporary()
    return own_folder() if short == tempfile.gettempdir() else _own_folder(short)


def short_temporary() -> str:
    """A folder for temporary files whose path is short enough for Unix sockets in its subfolders.

    Raises:
        UserError: all such folders have long paths, or cannot be written.
    """
    for folder in (tempfile.gettempdir(), *SHORT_FOLDERS):
        if len(os.fsencode(folder)) + SOCKET_ROOM <= SOCKET_PATH and os.access(folder, os.W_OK | os.X_OK):
            return folder
    raise UserError(
        f"no folder for sockets: TMPDIR = {tempfile.gettempdir()} has more than {SOCKET_PATH - SOCKET_ROOM} bytes, and "
        f"{' and '.join(SHORT_FOLDERS)} cannot be written; set TMPDIR to a shorter path"
    )


def is_abandoned(folder: Path) -> bool:
    """Whether the process that a folder of `own_folder` belonged to has ended."""
    try:
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        return isinstance(error, FileNotFoundError)  # any other error says nothing: another account's, for example
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(opened)
    return True


def _own_folder(temporary: str) -> Path:
    prefix = f"spo-{os.getuid()}-"
    for left in Path(temporary).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            lock = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left)
            finally:
                os.close(lock)
    while True:
        folder, process = Path(tempfile.mkdtemp(prefix=prefix, dir=temporary)), os.getpid()
        with contextlib.suppress(FileNotFoundError):  # another process removed it before it was locked
            fcntl.flock(os.open(folder, os.O_RDONLY | os.O_DIRECTORY), fcntl.LOCK_EX)
            if folder.exists():
                break

    def remove() -> None:
        if os.getpid() == process:  # not in a process that it forked
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


def append(path: Path, data: bytes) -> None:
    """Append to a file as a whole or not at all; on return data and file are on the disk."""
    with path.open("ab", buffering=0) as file:
        size = file.tell()
        try:
            written = file.write(data)
            if written != len(data):
                raise OSError(0, f"{written} of {len(data)} bytes were written")
            os.fsync(file.fileno())
        except OSError:
            file.truncate(size)
            raise
    if size == 0:
        sync_folder(path.parent)


def rewrite(path: Path, pieces: Iterable[bytes]) -> None:
    """Write a file in place of another, as a whole or not at all; on return it is on the disk."""
    with replacing(path) as file:
        file.writelines(pieces)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write in place of another, like `rewrite`; the other one stays if the block raises an exception."""
    new = path.with_name(f"{path.name}.new")
    try:
        with new.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except BaseException:
        with contextlib.suppress(OSError):
            new.unlink()
        raise
    sync_folder(path.parent)


def remove_oldest(folder: Path, keep_bytes: int, *, spare_first: bool = False) -> None:
    """Remove files, named by weight version, from the oldest on until the folder is within a size.

    Those of the newest version stay, and with `spare_first` those of the first.
    """
    files: defaultdict[int, list[Path]] = defaultdict(list)
    for path in folder.iterdir():
        name = path.name.partition(".")[0]
        if name.isdecimal():
            files[int(name)].append(path)
    spared = {max(files, default=0), *([min(files, default=0)] if spare_first else [])}
    size = 0
    for version in sorted(files, reverse=True):
        for path in files[version]:
            with contextlib.suppress(FileNotFoundError):  # another rank writes there too
                size += path.stat().st_size
        if version not in spared and size > keep_bytes:
            for path in files[version]:
                path.unlink(missing_ok=True)


def read_secret(path: str | Path, key: str) -> str:
    """The one line of a file, without white space around it; raises `UserError` if there is none, or it cannot be read.

    Args:
        key: setting or option that names the file, for messages: `broker.password_file`, `--token-file`.
    """
    try:
        secret = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a UTF-8 text file"
        raise UserError(f"cannot read {key} {path}: {reason}") from None
    if not secret:
        raise UserError(f"{key} {path} is empty; it holds the secret, on one line")
    return secret


def near_file(path: Path, suffixes: Collection[str]) -> str:
    """A hint to add to "does not exist": a file of a similar name and one of these suffixes; may be empty."""
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.suffix in suffixes]
    except OSError:
        return "" if os.path.isdir(path.parent) else f": there is no folder {path.parent}"
    near = nearest(path.name, names) or next((name for name in names if Path(name).stem == path.stem), None)
    return f"; did you mean {path.parent / near}?" if near else ""
