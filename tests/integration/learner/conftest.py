"""Runs whose learner is a process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.learner import save_tiny_model
from tests.support.learner_run import Run


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def runs(own_redis, tmp_path, model):
    """Makes runs on a server of the test's own; ends their processes."""
    made: list[Run] = []

    def make(name: str, **learner: Any) -> Run:
        made.append(Run(own_redis.url, name, tmp_path, model, **learner))
        return made[-1]

    yield make
    for process in (process for run in made for process in run.processes):
        process.kill()
