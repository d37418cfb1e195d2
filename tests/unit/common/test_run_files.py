"""Files of a run: what each process runs with, and the sampler's state beside a checkpoint."""

from __future__ import annotations

import json
import platform
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest

from common import versions
from common.errors import UserError
from common.files import tracker_is_whole
from common.release import release
from common.streams.broker import Broker


@pytest.fixture(autouse=True)
def _no_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keeps git out of it, since unit tests start no process."""
    monkeypatch.setattr(versions, "SOURCE", tmp_path)


def test_each_start_adds_a_line_with_what_the_process_runs_with(tmp_path: Path, broker: Broker) -> None:
    folder = tmp_path / "runs" / "mine"
    versions.record_versions(folder, "sampler", broker)
    versions.record_versions(folder, "generator-1", broker)
    first, second = map(json.loads, (folder / "versions.jsonl").read_text().splitlines())
    assert (first["process"], second["process"]) == ("sampler", "generator-1")
    assert first["python"] == platform.python_version()
    assert first["packages"]["redis"] == version("redis")
    assert first["packages"]["spo-trainer"] == version("spo-trainer")
    assert first["release"] == release() == second["release"]
    assert first["commit"] is None
    assert second["time"] >= first["time"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, broker: Broker) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=str(tmp_path / "file" / "mine")):
        versions.record_versions(tmp_path / "file" / "mine", "sampler", broker)


@pytest.mark.parametrize("where", [6, -60])
def test_a_file_with_one_wrong_byte_anywhere_is_not_whole(tmp_path: Path, where: int) -> None:
    path = tmp_path / "step_1.npz"
    np.savez(path, values=np.arange(100.0))
    assert tracker_is_whole(path)
    data = bytearray(path.read_bytes())
    directory = data.rindex(b"PK\x01\x02")
    # In the directory of the archive: flags, method of compression, and what comes behind.
    data[directory + 2 + where if where > 0 else where] ^= 0x09
    path.write_bytes(data)
    assert not tracker_is_whole(path)
