"""What is followed of a run folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.dashboard.watch import WatchedRun
from launcher.folder.run_folder import find_runs
from tests.support.dashboard import begin_run, write_episodes, write_step


def test_metrics_that_come_while_episodes_are_read_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = WatchedRun(find_runs([begin_run(tmp_path / "mine")])[0])
    run.update_metrics()
    read = run.episodes.update

    def read_slowly() -> bool:
        has_changed = read()
        write_step(run.folder.path, 1)
        run.update_metrics()
        return has_changed

    monkeypatch.setattr(run.episodes, "update", read_slowly)
    write_episodes(run.folder.path)
    before = run.stamp
    run.update_episodes()
    assert run.stamp == before + 2
