"""The integration tests of the sampler use a real server."""

from __future__ import annotations

import pytest

from common.streams.broker import Broker


@pytest.fixture
def broker(fake_broker: Broker) -> Broker:
    return fake_broker
