"""`spo-learner --ranks`: all ranks start, fail and end together, and their exit code is one that a supervisor knows."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from tests.support.checks import QUIET, refusal_of, run_file
from tests.support.forked import Forked, forked_module
from tests.support.processes import ended
from tests.support.waiting import PATIENCE, eventually

RANKS = 2


@contextmanager
def launched(folder: Path, **sections: Any) -> Iterator[tuple[Forked, list[int]]]:
    """Two ranks that wait for a Redis which is not there, and the process that has started them."""
    config = run_file(folder, broker={"url": "redis://127.0.0.1:1/0", "wait": 3600}, **sections)
    command = ["-c", str(config), "--ranks", str(RANKS)]
    process = forked_module("learner.cli", command, environment=os.environ | QUIET, log=folder / "log")
    try:
        eventually(lambda: len(waiting(process.pid)) == RANKS or process.poll() is not None)
        yield process, waiting(process.pid)
    finally:
        process.kill()


def waiting(launcher: int) -> list[int]:
    """Ranks that have read their configuration, and so handle signals."""
    with suppress(psutil.NoSuchProcess):
        return [child.pid for child in psutil.Process(launcher).children() if handles_sigterm(child.pid)]
    return []


def handles_sigterm(pid: int) -> bool:
    with suppress(FileNotFoundError):
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
        caught = next(line for line in status.splitlines() if line.startswith("SigCgt"))
        return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)
    return False


def test_ranks_end_with_a_killed_launcher(tmp_path: Path) -> None:
    with launched(tmp_path) as (process, ranks):
        process.kill()
        assert [ended(rank) for rank in ranks] == [True] * RANKS


def test_a_dead_rank_ends_the_others(tmp_path: Path) -> None:
    with launched(tmp_path) as (process, ranks):
        os.kill(ranks[1], signal.SIGKILL)
        assert process.wait(PATIENCE) == 128 + signal.SIGKILL
        assert ended(ranks[0])


def test_ranks_that_are_stopped_are_no_failure(tmp_path: Path) -> None:
    with launched(tmp_path) as (process, ranks):
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
        assert [ended(rank) for rank in ranks] == [True] * RANKS


def test_wrong_input_is_known_by_its_code(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with launched(tmp_path, run={"output_dir": str(tmp_path / "file")}) as (process, _):
        assert process.wait(PATIENCE) == 2
    errors = [line for line in (tmp_path / "log").read_text().splitlines() if line.startswith("error: ")]
    assert errors
    assert all("(Not a directory)" in line for line in errors)


def test_ranks_that_form_no_whole_groups_are_refused(tmp_path: Path) -> None:
    config = run_file(tmp_path, learner={"sequence_parallel": 2})
    words = "the number of the learner's ranks, 3: start a multiple of 2"
    assert words in refusal_of("learner.cli", "-c", config, "--ranks", "3")


def test_a_rank_does_not_start_ranks(tmp_path: Path) -> None:
    assert "RANK is set" in refusal_of("learner.cli", "-c", run_file(tmp_path), "--ranks", "2", RANK="0")
