"""Curves in TensorBoard: a run that continues at an earlier step writes over what came after it."""

from __future__ import annotations

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from common.metrics import MetricsWriter


def test_a_curve_that_was_rewound_has_each_step_once(tmp_path: Path) -> None:
    first = MetricsWriter(tmp_path)
    for step in range(1, 6):
        first.write(step, {"reward": 0.0})
    first.close()
    # Files of writers are read in the order of their names, which begin with the second they were made in.
    for path in tmp_path.iterdir():
        path.rename(path.with_name(path.name.replace("tfevents.", "tfevents.0")))
    second = MetricsWriter(tmp_path)
    second.rewind(4)
    second.write(4, {"reward": 1.0})
    second.close()
    curve = EventAccumulator(str(tmp_path)).Reload().Scalars("reward")
    assert [(point.step, point.value) for point in curve] == [(1, 0.0), (2, 0.0), (3, 0.0), (4, 1.0)]
