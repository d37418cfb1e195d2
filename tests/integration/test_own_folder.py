"""What processes keep among the temporary files goes with them, also where they are killed."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

MAKES = """
import sys
from common.files import {0}
({0}() / "kept").write_text("x")
print({0}(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose path is shorter than pytest's."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder:
        yield Path(folder)


def started(temporary: Path, function: str = "own_folder") -> tuple[subprocess.Popen[str], Path]:
    """A process that has made its folder, and the folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", MAKES.format(function)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={"TMPDIR": str(temporary)}, cwd=Path.cwd(),
    )  # fmt: skip
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_a_folder_goes_with_its_process_or_with_the_next(tmp_path: Path) -> None:
    living, its_own = started(tmp_path)
    killed, left = started(tmp_path)
    killed.kill()
    killed.communicate()
    assert left.exists()
    last, third = started(tmp_path)
    assert not left.exists()
    assert (its_own / "kept").exists()
    for process in (living, last):
        process.communicate("", timeout=600)
    assert not its_own.exists()
    assert not third.exists()


@pytest.mark.parametrize("length", [43, 44])
def test_a_folder_for_sockets_has_a_short_path_and_goes_with_its_process(length: int, short_path: Path) -> None:
    temporary = short_path / ("x" * (length - len(str(short_path)) - 1))
    temporary.mkdir()
    process, folder = started(temporary, "socket_folder")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/{uuid.uuid4()}")  # as vLLM names its sockets
    assert (folder.parent == temporary) == (length <= 43)
    process.communicate("", timeout=600)
    assert not folder.exists()
    assert length <= 43 or not list(temporary.iterdir())
