"""What a power cut of `spo chaos` leaves of a run's files, and what of them the product has synced by then."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.files import append, rewrite
from launcher.layout.layout import Placement
from launcher.run.processes import start_all
from launcher.run.supervisor import Supervisor
from sampler.cli import write_config
from tests.chaos.disk import Disk
from tests.chaos.hook.sitecustomize import SYNCED, note_syncs
from tests.support.sampler import make_config
from tests.support.sampler_driving import LOG


@pytest.fixture(autouse=True)
def _noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", os.fsync)  # put back after the test
    note_syncs()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    made = SimpleNamespace(now=time.time())
    monkeypatch.setattr("tests.chaos.disk.time", SimpleNamespace(time=lambda: made.now))
    return made


class Least(random.Random):
    """Draws the least of each range."""

    def randint(self, a: int, b: int) -> int:
        return a


def test_a_power_cut_takes_only_what_was_not_on_the_disk(tmp_path: Path, clock: SimpleNamespace) -> None:
    log, grown, torn, renamed, never, old, model = (
        tmp_path / name for name in ("redis/appendonly.aof", "grown", "torn", "renamed", "never", "old", "inputs/model")
    )
    disk = Disk(tmp_path)
    for path in (log, grown, torn, never, old, model):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"early")
    disk.look()
    clock.now += 40
    for path in (log, never):
        path.write_bytes(b"early later")
    disk.look()
    clock.now += 2
    append(torn, b" synced")
    rewrite(tmp_path / "new", [b"synced"])
    (tmp_path / "new").rename(renamed)
    unsynced = tmp_path / "unsynced"
    for path in (log, torn, unsynced):
        with path.open("ab") as file:
            file.write(b" lost")
    for path in (log, torn, renamed, never, unsynced):
        os.utime(path, (clock.now, clock.now))
    lost = disk.lose(Least())
    expected = {log: b"early later", grown: b"early", torn: b"early synced", renamed: b"synced", never: b"early"}
    expected |= {old: b"early", model: b"early", unsynced: b""}
    assert {path: path.read_bytes() for path in expected} == expected
    assert lost == len(b" lost") * 3 + len(b" later")


def test_the_configuration_of_a_run_is_on_the_disk(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    write_config(config)
    start_all(config, tmp_path / "run.yaml", {}, Placement((), ()), Supervisor(tmp_path / "logs", LOG))
    for path in (config.run.folder / "config.yaml", tmp_path / "run.yaml"):
        assert int(os.getxattr(path, SYNCED)) == path.stat().st_size > 0
