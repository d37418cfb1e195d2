"""What processes keep among the temporary files goes with them, also where they are killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

MAKES = """
import sys
from common.files import own_folder
(own_folder() / "kept").write_text("x")
print(own_folder(), flush=True)
sys.stdin.read()
"""


def started(temporary: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process that has made its folder, and the folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", MAKES],
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
        process.communicate("", timeout=60)
    assert not its_own.exists()
    assert not third.exists()
