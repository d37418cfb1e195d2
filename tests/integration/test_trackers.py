"""Trackers get what `metrics.jsonl` has, in order, once, and nothing that they do stops a run."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
from structlog.testing import capture_logs

from sampler.files.metrics_file import Entry, Histogram, MetricsFile
from sampler.trackers import feed
from sampler.trackers.feed import TrackerFeed
from tests.support.run_folder import add_evaluation
from tests.support.sampler import make_config
from tests.support.tracked import TRACKERS, offline, read_back, run_id, tables

pytestmark = pytest.mark.slow

LOG = structlog.get_logger()
# A sampler's life, as far as trackers see it.
LIFE = """
import sys
from pathlib import Path
import structlog
from sampler.trackers import feed
from sampler.trackers.feed import TrackerFeed
from tests.support.sampler import make_config
feed.LAST_OF_RUN = 600.0  # a busy machine is no failure
folder, *trackers = sys.argv[1:]
config = make_config(Path(folder))
file = config.run.folder / "metrics.jsonl"
feeds = [TrackerFeed(name, config, file, structlog.get_logger()) for name in trackers]
for each in feeds:
    each.stop(True)
for each in feeds:
    each.join()
"""


def entries(versions: range) -> list[Entry]:
    ages = {"staleness/total": Histogram.of_integers(np.array([0, 1, 1]))}
    of_sampler = [Entry(v, "sampler", {"reward/mean": v / 8, "validation/avg@4": 0.5}, ages) for v in versions]
    return [*of_sampler, Entry(versions[-1], "generator-1", {"generator/tokens": 5.0})]


def live(folder: Path, *trackers: str) -> None:
    """A sampler begins, sends what there is, and ends."""
    command = [sys.executable, "-c", LIFE, str(folder), *trackers]
    done = subprocess.run(command, env=os.environ | offline(folder), capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "failed" not in done.stdout, done.stdout


def test_each_tracker_has_every_entry_once_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_config(tmp_path).run.folder
    folder.mkdir()
    file = MetricsFile(folder, LOG)
    file.append(entries(range(1, 4)))
    evaluate(file, 3)
    live(tmp_path, *TRACKERS)
    first = {tracker: run_id(tracker, folder) for tracker in TRACKERS}
    file.append(entries(range(4, 7)))
    live(tmp_path, *TRACKERS)
    assert {tracker: run_id(tracker, folder) for tracker in TRACKERS} == first
    monkeypatch.setattr("trackio.utils.TRACKIO_DIR", tmp_path / "trackio")
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "trackio", raising=False)
    for tracker in TRACKERS:
        values = read_back(tracker, folder)
        assert values["reward/mean"] == [(v, v / 8) for v in range(1, 7)], tracker
        assert values["validation/avg@4" if tracker != "mlflow" else "validation/avg_at_4"][-1] == (6, 0.5)
        assert tables(tracker, folder) == ([] if tracker == "tensorboard" else [SAMPLES]), tracker
        assert values["generator/tokens" if tracker == "tensorboard" else "generator-1/tokens"] == [(3, 5), (6, 5)]


SAMPLES = [["question a", "2", "2", 1.0], ["question b", "2", "2", 0.25]]


class Recorder:
    """A tracker that fails while its server is away."""

    id, settles = "recorded", 0.0

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.discarded: list[int] = []
        self.samples: dict[int, list[list[Any]]] = {}
        self.is_away = False
        self.tried, self.got = threading.Semaphore(0), threading.Semaphore(0)

    def log(self, entries: Sequence[Entry]) -> None:
        self.tried.release()
        if self.is_away:
            raise ConnectionError("server gone")
        self.entries += entries
        self.got.release()

    def log_samples(self, version: int, rows: list[list[Any]]) -> None:
        self.samples[version] = rows

    def discard(self, version: int) -> None:
        self.discarded.append(version)

    def close(self, finished: bool) -> None: ...

    def has_got(self) -> None:
        """Wait for what comes next."""
        assert self.got.acquire(timeout=600)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder()
    monkeypatch.setattr(feed, "open_tracker", lambda *_: made)
    monkeypatch.setattr(feed, "PAUSE", 0.02)
    return made


def begun(folder: Path) -> tuple[MetricsFile, TrackerFeed]:
    config: Any = make_config(folder)
    config.run.folder.mkdir(exist_ok=True)
    file = MetricsFile(config.run.folder, LOG)
    return file, TrackerFeed("wandb", config, file.path, LOG)


def end(follows: TrackerFeed, *, finished: bool = True) -> None:
    follows.stop(finished)
    follows.join()


def test_a_tracker_that_was_away_gets_what_it_missed(tmp_path: Path, recorder: Recorder) -> None:
    with capture_logs() as logs:
        file, follows = begun(tmp_path)
        recorder.is_away = True
        file.append(entries(range(1, 3)))
        follows.wake()
        for _ in range(3):
            assert recorder.tried.acquire(timeout=600)
        file.append(entries(range(3, 5)))
        recorder.is_away = False
        recorder.has_got()
        end(follows)
    assert [entry.version for entry in recorder.entries if entry.process == "sampler"] == [1, 2, 3, 4]
    assert [entry["tracker"] for entry in logs if entry["log_level"] == "warning"] == ["wandb"]


def evaluate(file: MetricsFile, version: int) -> None:
    """A complete evaluation of a version: its figures, and the file of its answers."""
    messages = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    add_evaluation(file.path.parent, version, {"a": [1.0], "b": [0.25]}, output="2", gts=2, messages=messages)
    file.append([Entry(version, "sampler", {"validation/reward": 0.625}, {})])


def test_an_evaluation_comes_with_its_first_answers(tmp_path: Path, recorder: Recorder, monkeypatch) -> None:
    monkeypatch.setattr("sampler.trackers.samples.MOST", 1)
    file, follows = begun(tmp_path)
    evaluate(file, 2)
    file.append([Entry(3, "sampler", {"validation/reward": 1.0}, {})])  # its answers were removed to save space
    end(follows)
    assert recorder.samples == {2: [["question a", "2", "2", 1.0]]}


def test_versions_made_again_replace_those_before(tmp_path: Path, recorder: Recorder) -> None:
    file, follows = begun(tmp_path)
    file.append(entries(range(1, 6)))
    follows.wake()
    recorder.has_got()
    follows.discard(2, file.discard(2))
    file.append(entries(range(3, 4)))
    follows.wake()
    recorder.has_got()
    assert recorder.discarded == [2]
    versions = [entry.version for entry in recorder.entries if entry.process == "sampler"]
    assert versions == [1, 2, 3, 4, 5, 3]
    follows.discard(0, file.discard(0))
    end(follows)
    assert run_id("wandb", file.path.parent) == ""


def test_a_tracker_that_was_behind_gets_what_stays_when_the_run_goes_back(tmp_path: Path, recorder: Recorder) -> None:
    file, follows = begun(tmp_path)
    file.append(entries(range(1, 3)))
    follows.wake()
    recorder.has_got()
    end(follows, finished=False)
    file.append(entries(range(3, 7)))  # of the sampler's last moments, when the tracker no longer answered
    file, follows = begun(tmp_path)
    follows.discard(5, file.discard(5))
    follows.discard(4, file.discard(4))
    file.append(entries(range(5, 6)))
    follows.wake()
    end(follows)
    assert recorder.discarded == [5, 4]
    versions = [entry.version for entry in recorder.entries if entry.process == "sampler"]
    assert [*dict.fromkeys(versions)] == [1, 2, 3, 4, 5]  # 5 once or twice


def test_what_a_kill_may_have_taken_along_is_sent_again(tmp_path: Path, recorder: Recorder) -> None:
    recorder.settles = 1e9
    file, follows = begun(tmp_path)
    file.append(entries(range(1, 4)))
    follows.wake()
    recorder.has_got()
    sent = list(recorder.entries)
    _, successor = begun(tmp_path)  # of a sampler that was killed now
    end(successor, finished=False)
    assert recorder.entries == 2 * sent
    _, last = begun(tmp_path)  # of one that has stopped
    end(last)
    assert recorder.entries == 2 * sent
    end(follows)


def test_a_file_that_is_full_is_sent_to_its_end(tmp_path: Path, recorder: Recorder) -> None:
    file, follows = begun(tmp_path)
    file._max_bytes = 4000
    for version in range(1, 41):
        if file.append(entries(range(version, version + 1))):
            follows.begin_new_file()
        follows.wake()
        recorder.has_got()
    end(follows)
    assert [entry.version for entry in recorder.entries if entry.process == "sampler"] == list(range(1, 41))
    assert file.path.with_suffix(".old.jsonl").exists()
