"""A run's values in its trackers, read back by their own libraries."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")
Values = dict[str, list[tuple[int, float]]]  # (version, value) by name
BLOCK, HEADER = 32768, 7  # of an offline wandb run's log


def offline(folder: Path) -> dict[str, str]:
    """Environment in which trackers stay in a folder; an absent proxy refuses everything else."""
    nowhere = "http://127.0.0.1:9"
    return {
        "WANDB_MODE": "offline",
        "TRACKIO_DIR": str(folder / "trackio"),
        "HF_HUB_OFFLINE": "1",
        "HTTP_PROXY": nowhere,
        "HTTPS_PROXY": nowhere,
        "ALL_PROXY": nowhere,
    }


def read_back(tracker: str, run: Path) -> Values:
    """All values that a tracker has of the run in this folder, in the order of logging."""
    return {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow, "trackio": _trackio}[tracker](run)


def tables(tracker: str, run: Path) -> list[Any]:
    """The rows of each table of samples that a tracker has of the run in this folder."""
    if tracker == "wandb":
        paths = sorted((run / "wandb").glob("offline-run-*/files/media/table/validation/samples*.json"))
    elif tracker == "mlflow":
        paths = sorted((run / "mlruns").glob(f"*/{run_id(tracker, run)}/artifacts/samples/*.json"))
    elif tracker == "trackio":
        from trackio.sqlite_storage import SQLiteStorage

        logs = SQLiteStorage.get_logs("spo", run_id(tracker, run))
        found = [row["validation/samples"]["_value"] for row in logs if "validation/samples" in row]
        return [[list(row.values()) for row in table] for table in found]
    else:
        paths = []
    return [json.loads(path.read_text())["data"] for path in paths]


def run_id(tracker: str, run: Path) -> str:
    return str(json.loads((run / "trackers" / f"{tracker}.json").read_text())["id"])


def _tensorboard(run: Path) -> Values:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    values: Values = {}
    for process in (run / "tensorboard").iterdir():
        events = EventAccumulator(str(process), size_guidance={"scalars": 0}).Reload()
        for name in events.Tags()["scalars"]:
            values[name] = [(event.step, event.value) for event in events.Scalars(name)]
    return values


def _wandb(run: Path) -> Values:
    from wandb.proto.wandb_internal_pb2 import Record

    values: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
    for path in sorted((run / "wandb").glob(f"offline-run-*-{run_id('wandb', run)}/*.wandb")):
        for data in _records(path.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            for name, value in items.items():
                if isinstance(value, int | float):
                    values[name].append((items["version"], value))
    return dict(values)


def _records(data: bytes) -> Iterator[bytes]:
    """Records of LevelDB's log format: checksum (4 bytes), length (2), type (1: whole; 2, 3, 4: its parts), data."""
    at, parts = HEADER, b""
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (1, 4):
            yield parts
            parts = b""


def _mlflow(run: Path) -> Values:
    with patch.dict(os.environ, {"MLFLOW_ALLOW_FILE_STORE": "true"}):
        from mlflow.tracking import MlflowClient

        client, name = MlflowClient((run / "mlruns").absolute().as_uri()), run_id("mlflow", run)
        return {
            metric: [(point.step, point.value) for point in client.get_metric_history(name, metric)]
            for metric in client.get_run(name).data.metrics
        }


def _trackio(run: Path) -> Values:
    from trackio.sqlite_storage import SQLiteStorage

    values: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
    rows: list[dict[str, Any]] = SQLiteStorage.get_logs("spo", run_id("trackio", run))
    for row in rows:
        for name, value in row.items():
            if isinstance(value, int | float) and name != "step":
                values[name].append((row["step"], value))
    return dict(values)
