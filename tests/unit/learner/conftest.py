"""The tiny model that tests of the learner read."""

from __future__ import annotations

import pytest

from tests.support.learner import save_tiny_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"))
