"""A lab that is closed after the test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from common.config import WeightsConfig
from tests.support.weights import CHUNK, CONFIG, CREDIT, Lab


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few MiB of weights are several chunks, more than a client asks for ahead."""
    monkeypatch.setattr("learner.publish.weight_server.CHUNK_BYTES", CHUNK)
    monkeypatch.setattr("common.weights.connection.CREDIT", CREDIT)


@pytest.fixture
def config() -> WeightsConfig:
    return CONFIG


@pytest.fixture
def lab(config: WeightsConfig) -> Iterator[Lab]:
    lab = Lab(config)
    yield lab
    lab.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that wait look around ten times a second."""
    monkeypatch.setattr("common.weights.connection.POLL_AGAIN", 0.1)
    monkeypatch.setattr("common.weights.follow.RETRY", 0.02)
