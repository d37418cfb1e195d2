"""What MLflow refuses, and how a run's metrics get there all the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.sampler import make_config

validation = pytest.importorskip("mlflow.utils.validation")
tracker = pytest.importorskip("sampler.trackers.mlflow_tracker")


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("validation/avg@4", "validation/avg_at_4"),
        ("reward/é [x]", "reward/_ _x_"),
        ("reward/", "reward/_"),
        ("reward//x", "reward/_/x"),
        ("reward/../x", "reward/__/x"),
        ("./reward", "_/reward"),
        ("reward/...", "reward/..."),
        (f"reward/{'x' * 243}", f"reward/{'x' * 243}"),
        (f"reward/{'x' * 244}", f"reward/{'x' * 242}_"),
        (f"{'x' * 249}/y", f"{'x' * 249}_"),
    ],
)
def test_mlflow_takes_every_metric_by_a_name_that_it_allows(name: str, allowed: str) -> None:
    assert tracker.allowed(name) == allowed
    validation._validate_metric(allowed, 1.0, 0, 0)
    validation._validate_param(allowed, "1")


def test_variables_of_mlflow_that_are_empty_count_as_not_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.setenv(variable, "")
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    run = tracker.MlflowTracker(make_config(tmp_path), tmp_path, "").id
    (folder,) = (tmp_path / "mlruns").glob(f"*/{run}")
    assert "name: spo\n" in (folder.parent / "meta.yaml").read_text()
