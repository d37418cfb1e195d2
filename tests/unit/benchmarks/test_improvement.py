"""What evaluations say of a run's learning: means over the same prompts, and their bands."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.improvement import band, versions


def evaluation(folder: Path, version: int, rewards: dict[str, list[float | None]]) -> None:
    """None: set aside."""
    rows = [
        {"prompt_id": prompt, "reward": reward or 0.0, "status": "set_aside" if reward is None else "ok"}
        for prompt, values in rewards.items()
        for reward in values
    ]
    (folder / "validation_data").mkdir(exist_ok=True)
    (folder / "validation_data" / f"{version}.jsonl").write_text("\n".join(map(json.dumps, rows)))


def test_versions_are_compared_prompt_by_prompt(tmp_path: Path) -> None:
    evaluation(tmp_path, 10, {"b": [1, 1], "a": [1, None]})
    evaluation(tmp_path, 0, {"a": [0, 1], "b": [0, 0]})
    found = {version: rewards.tolist() for version, rewards in versions(tmp_path).items()}
    assert found == {0: [0.5, 0.0], 10: [0.5, 1.0]}


def test_evaluations_of_other_prompts_are_refused(tmp_path: Path) -> None:
    evaluation(tmp_path, 0, {"a": [0]})
    evaluation(tmp_path, 10, {"b": [0]})
    with pytest.raises(SystemExit, match="version 10 was asked other prompts than version 0"):
        versions(tmp_path)
    with pytest.raises(SystemExit, match="no evaluations"):
        versions(tmp_path / "none")


def test_the_band_is_that_of_the_mean() -> None:
    values = np.random.default_rng(1).normal(0.5, 0.3, 400)
    mean, low, high = band(values)
    error = values.std() / 20
    assert mean == values.mean()
    assert (low, high) == (
        pytest.approx(mean - 1.96 * error, abs=0.1 * error),
        pytest.approx(mean + 1.96 * error, abs=0.1 * error),
    )
    assert band(np.ones(5)) == (1.0, 1.0, 1.0)
