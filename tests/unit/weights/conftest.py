"""A weight server, clients that are closed after the test, and a socket that speaks the protocol by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from generator.weight_client import WeightClient
from learner.weight_server import WeightServer
from tests.weights_tools import (
    CONFIG,
    Requests,
)


@pytest.fixture
def server() -> Iterator[WeightServer]:
    server = WeightServer(CONFIG)
    yield server
    server.close()


@pytest.fixture
def client_of() -> Iterator[Callable[..., WeightClient]]:
    """Makes clients that are closed after the test."""
    clients: list[WeightClient] = []

    def make(endpoint: Callable[[], dict[str, str] | None], **options: object) -> WeightClient:
        config = options.pop("config", CONFIG)
        clients.append(WeightClient(endpoint, config, **options))  # type: ignore[arg-type]
        return clients[-1]

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def requests(server: WeightServer) -> Iterator[Requests]:
    requests = Requests(server)
    yield requests
    requests.close()
