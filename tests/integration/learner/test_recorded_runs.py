"""Fixed-seed runs of every kind of correction and loss come out as they were recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.recorded_runs import RECORD, differences, train_all

pytestmark = pytest.mark.slow

RECORDED: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
# Another processor takes sums in another order, and six optimizer steps carry that on.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return train_all(Path(tmp_path_factory.mktemp("recorded")))


@pytest.mark.parametrize("name", RECORDED)
def test_metrics_and_weights_are_those_that_were_recorded(trained: dict[str, Any], name: str) -> None:
    _, worst, where = differences(RECORDED[name], trained[name])
    assert worst < TOLERANCE, where
