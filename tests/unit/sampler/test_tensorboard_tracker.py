"""TensorBoard: steps that are made again take over, and nothing else takes one away."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sampler.metrics_file import Entry
from sampler.trackers.tensorboard_tracker import TensorBoardTracker
from tests.support.sampler import make_config


def test_a_learner_that_came_back_writes_over_its_steps_and_a_late_heartbeat_over_none(tmp_path: Path) -> None:
    tracker = TensorBoardTracker(make_config(tmp_path), tmp_path, "")
    steps = [Entry(version, "learner", {"actor/loss": 0.0}) for version in range(1, 7)]
    late = Entry(5, "learner", {"process/cpu_seconds": 1.0})
    again = [Entry(version, "learner", {"actor/loss": 1.0}) for version in (4, 5)]
    tracker.log([*steps, late])
    tracker.log(again)
    tracker.close(True)
    curve = EventAccumulator(str(tmp_path / "tensorboard" / "learner")).Reload().Scalars("actor/loss")
    assert [(point.step, point.value) for point in curve] == [(1, 0), (2, 0), (3, 0), (4, 1), (5, 1)]


def test_a_heartbeat_of_the_version_before_takes_no_step_away(tmp_path: Path) -> None:
    tracker = TensorBoardTracker(make_config(tmp_path), tmp_path, "")
    tracker.log([Entry(6, "learner", {"actor/loss": 0.5}), Entry(5, "learner", {"process/cpu_seconds": 1.0})])
    tracker.close(True)
    events = EventAccumulator(str(tmp_path / "tensorboard" / "learner")).Reload()
    assert [point.step for point in events.Scalars("actor/loss")] == [6]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of TensorBoard's own thread
def test_files_that_could_not_be_written_are_begun_anew(tmp_path: Path) -> None:
    tracker = TensorBoardTracker(make_config(tmp_path), tmp_path, "")
    tracker.log([Entry(1, "learner", {"actor/loss": 1.0})])
    shutil.rmtree(tmp_path / "tensorboard")
    entries = [Entry(2, "learner", {"actor/loss": 2.0})]
    with pytest.raises(OSError, match="learner"):
        tracker.log(entries)
    tracker.log(entries)
    tracker.close(True)
    curve = EventAccumulator(str(tmp_path / "tensorboard" / "learner")).Reload().Scalars("actor/loss")
    assert [(point.step, point.value) for point in curve] == [(2, 2.0)]
