"""Replies of Redis that never arrive: the client repeats what it asked, of which a part has been done."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from common.config import BrokerConfig
from common.messages import Batch
from common.streams.batches import GROUP, BatchInbox
from common.streams.broker import Broker, connect
from tests.chaos.proxy import Proxy
from tests.conftest import RedisServer

pytestmark = pytest.mark.integration


@pytest.fixture
def direct(redis_server: RedisServer) -> Broker:
    broker = connect(BrokerConfig(url=redis_server.url), "replies")
    broker.redis.flushall()
    return broker


def test_batches_come_in_order_also_if_the_reply_with_one_was_lost(
    redis_server: RedisServer, direct: Broker, tmp_path: Path
) -> None:
    proxy = Proxy(redis_server.url, tmp_path / "proxy")
    try:
        inbox = BatchInbox(connect(BrokerConfig(url=proxy.url), "replies"))
        with ThreadPoolExecutor(1) as threads:
            first = threads.submit(inbox.next, 20_000)
            while not direct.redis.info("clients")["blocked_clients"]:
                pass
            proxy.disturb("mute", 1.0, 0)
            for batch_id in range(2):
                batch = Batch(batch_id=batch_id, sample_ids=["a"], advantages=[0.0], rewards=[0.0], tokens=[1])
                direct.redis.xadd(direct.key("batches"), {"batch": batch.pack()})
            proxy.heal()
            batches = [first.result(timeout=30), inbox.next(0)]
        assert direct.redis.xpending(direct.key("batches"), GROUP)["pending"] == 2
        assert [batch.batch_id for batch in batches if batch] == [0, 1]
    finally:
        proxy.close()
