"""MLflow: a server by `MLFLOW_TRACKING_URI`, otherwise files in the run folder."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from common.config import Config, dump_config
from sampler.files.metrics_file import Entry
from sampler.trackers.base import Tracker, flat_config, flat_name
from sampler.trackers.samples import COLUMNS

MOST_METRICS, MOST_PARAMS = 1000, 100  # per request
LONGEST_NAME, LONGEST_PARAM = 250, 6000  # characters


class MlflowTracker(Tracker):
    """One run; its steps are the weight versions."""

    def __init__(self, config: Config, folder: Path, run_id: str) -> None:
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # MLflow 3 refuses files without it
        self._client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or (folder / "mlruns").absolute().as_uri())
        self.id = run_id or self._new_run(config)
        self._client.update_run(self.id, status="RUNNING")
        self._client.log_text(self.id, dump_config(config), "config.yaml")

    def log(self, entries: Sequence[Entry]) -> None:
        """Send entries; MLflow has no histograms."""
        metrics = [
            Metric(allowed(flat_name(entry.process, name)), value, int(1000 * entry.time), entry.version)
            for entry in entries
            for name, value in entry.values.items()
        ]
        for start in range(0, len(metrics), MOST_METRICS):
            self._client.log_batch(self.id, metrics=metrics[start : start + MOST_METRICS])

    def log_samples(self, version: int, rows: list[list[Any]]) -> None:
        # In the form of `log_table`, which would append the rows once more if they are sent again.
        self._client.log_dict(self.id, {"columns": list(COLUMNS), "data": rows}, f"samples/{version}.json")

    def close(self, finished: bool) -> None:
        """Mark the run as finished, or as interrupted."""
        self._client.set_terminated(self.id, "FINISHED" if finished else "KILLED")

    def _new_run(self, config: Config) -> str:
        client, name = self._client, os.environ.get("MLFLOW_EXPERIMENT_NAME") or "spo"
        experiment = client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment else client.create_experiment(name)
        run_id: str = client.create_run(experiment_id, run_name=config.run.experiment).info.run_id
        params = [Param(allowed(key), str(value)[:LONGEST_PARAM]) for key, value in flat_config(config).items()]
        for start in range(0, len(params), MOST_PARAMS):
            client.log_batch(run_id, params=params[start : start + MOST_PARAMS])
        return run_id


def allowed(name: str) -> str:
    """The name in a form that MLflow allows: `avg@4` becomes `avg_at_4`; as a path it is short and leads to itself."""
    plain = re.sub(r"[^\w\-./: ]", "_", name.replace("@", "_at_"), flags=re.ASCII)
    path = "/".join("_" * max(1, len(part)) if part in ("", ".", "..") else part for part in plain.split("/"))
    return path if len(path) <= LONGEST_NAME else path[: LONGEST_NAME - 1] + "_"
