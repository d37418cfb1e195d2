"""A real broker that blocks only for a moment."""

from __future__ import annotations

import pytest

from common.streams.broker import Broker


@pytest.fixture
def broker(real_broker: Broker, monkeypatch: pytest.MonkeyPatch) -> Broker:
    monkeypatch.setattr("sampler.loop.BLOCK_MS", 1)
    monkeypatch.setattr("sampler.loop.IDLE_MS", 1)
    return real_broker
