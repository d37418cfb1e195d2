"""A run folder belongs to one command at a time, and a second command names the first."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from pathlib import Path

import pytest

from common.errors import UserError
from launcher.run.folder_lock import FolderInUse, locked

GONE = 2**22 + 1  # above the highest process id that Linux gives


def test_a_folder_is_one_commands_until_it_has_ended(tmp_path: Path) -> None:
    line = rf"run folder {tmp_path}/run is in use by process {os.getpid()} on {socket.gethostname()}, since 20"
    for _ in range(2):
        with (
            locked(tmp_path / "run", "--output"),
            pytest.raises(FolderInUse, match=rf"{line}.*choose another --output"),
            locked(tmp_path / "run", "--output"),
        ):
            pass


def test_what_a_killed_command_left_behind_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_text(json.dumps({"pid": GONE, "host": socket.gethostname(), "since": "2026-01-01 00:00:00"}))
    with path.open("a") as left:
        fcntl.flock(left, fcntl.LOCK_EX)
        with pytest.raises(FolderInUse, match=str(GONE)), locked(tmp_path, "--output", wait=0):
            pass
    with locked(tmp_path, "--output", wait=0):
        assert json.loads(path.read_text())["pid"] == os.getpid()


def test_a_lock_that_says_nothing_is_respected(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(FolderInUse, match="in use by another command"), locked(tmp_path, "--output", wait=0):
            pass


def test_a_folder_that_cannot_be_made_is_a_users_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"), locked(tmp_path / "file" / "run", "--output"):
        pass
