"""A run's ledger, for tests of the streams."""

from __future__ import annotations

import pytest

from common.streams.broker import Broker
from common.streams.ledger import SamplerLedger


@pytest.fixture
def ledger(broker: Broker) -> SamplerLedger:
    ledger = SamplerLedger(broker, "first")
    ledger.acquire()
    return ledger
