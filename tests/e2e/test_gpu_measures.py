"""What `make test-gpu` measures, on the CPU and a tiny model: the same code, as far as it goes without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.gpu_measures import TINY, engine_measures, learner_measures, save_model

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model(folder, TINY)
    return folder


def test_the_learner_trains_and_publishes(model: Path, tmp_path: Path) -> None:
    measures = learner_measures(model, tmp_path, TINY)
    assert measures["learner tokens/s"] > 0
    assert measures["publish seconds"] > 0


def test_bfloat16_logprobs_agree_before_and_after_an_update(model: Path, tmp_path: Path) -> None:
    measures = engine_measures(model, tmp_path, TINY)
    assert measures["log-prob gap"] < 0.02
    assert measures["after an update"] < 0.02
    assert measures["with old weights"] > 2 * measures["after an update"]
    assert measures["load pause s"] > 0
