"""A weight server, clients that are closed after the test, and a socket that speaks the protocol by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from common.config import WeightsConfig
from generator.weights.weight_client import WeightClient
from learner.weight_server import WeightServer
from tests.support.weights import CONFIG, PATIENCE, ClientOf, RelayOf, Requests, RunningRelay


@pytest.fixture
def config() -> WeightsConfig:
    """Of server, clients and relays; a file of tests may have its own."""
    return CONFIG


@pytest.fixture
def server(config: WeightsConfig) -> Iterator[WeightServer]:
    server = WeightServer(config)
    yield server
    server.close()


@pytest.fixture
def client_of(config: WeightsConfig) -> Iterator[ClientOf]:
    """Makes clients that are closed after the test."""
    clients: list[WeightClient] = []

    def make(endpoint: Callable[[], dict[str, str] | None], **options: object) -> WeightClient:
        own = options.pop("config", config)
        options.setdefault("timeout", PATIENCE)  # a machine that is busy loses no connection
        clients.append(WeightClient(endpoint, own, **options))  # type: ignore[arg-type]
        return clients[-1]

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def requests(server: WeightServer) -> Iterator[Requests]:
    requests = Requests(server)
    yield requests
    requests.close()


@pytest.fixture
def relay_of(config: WeightsConfig) -> Iterator[RelayOf]:
    """Makes relays that are closed after the test."""
    relays: list[RunningRelay] = []

    def make(learner: Callable[[], dict[str, str] | None], **options: object) -> RunningRelay:
        options.setdefault("timeout", PATIENCE)
        options.setdefault("config", config)
        relays.append(RunningRelay(learner, **options))
        return relays[-1]

    yield make
    for relay in relays:
        relay.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits looks around ten times a second."""
    monkeypatch.setattr("common.weights.connection.POLL_AGAIN", 0.1)
    monkeypatch.setattr("common.weights.follow.RETRY", 0.02)
