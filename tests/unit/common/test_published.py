"""Values that processes publish for all: relays by machine, and another program's, which cannot be read."""

from __future__ import annotations

import io
import socket
import time
from typing import Any

import msgpack
import pytest
from rich.console import Console

from common.config import WeightsConfig
from common.streams.broker import Broker
from common.streams.presence import Presence
from common.streams.relays import announce, machine_name, nearby, withdraw
from launcher.run.display import figures, process_rows
from launcher.run.progress import Progress

ODD = [
    b"\xff not msgpack", b"", msgpack.packb(7), msgpack.packb(None), msgpack.packb([1, 2]), msgpack.packb({}),
    msgpack.packb({"role": 1, "host": [], "pid": "x", "state": None, "version": "1", "accuracy": "high", "at": "now"}),
    msgpack.packb({"role": "generator", "host": "h", "pid": 1, "state": "running", "tokens_per_second": "many",
                   "version": 1, "accuracy": 0.5, "samples": 2, "figures": {"accuracy": "high"}, "at": 1.0}),
]  # fmt: skip


def shown(*renderables: Any) -> str:
    console = Console(file=io.StringIO(), width=200)
    for renderable in renderables:
        console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("odd", ODD)
def test_the_views_say_what_cannot_be_read_and_show_the_rest(fake_broker: Broker, odd: bytes) -> None:
    redis, key = fake_broker.redis, fake_broker.key
    Presence(fake_broker, "sampler-1", "sampler").beat()
    redis.hset(key("processes"), b"other\xff", odd)
    redis.zadd(key("alive"), {b"other\xff": time.time() * 1000})
    redis.hset(key("evaluations"), "0", msgpack.packb({"version": 0, "accuracy": 0.25, "samples": 4}))
    redis.hset(key("evaluations"), "1", odd)
    progress = Progress(fake_broker, steps=8)
    assert progress.refresh()
    assert progress.processes["other\ufffd"]["state"] == "unreadable"
    assert [process["state"] for process in progress.of_role("sampler")] == ["starting"]
    assert [result["accuracy"] for result in progress.evaluations] == [0.25]
    rows = shown(figures(progress), process_rows(progress, {})).splitlines()
    assert any("other" in row and "unreadable" in row for row in rows)
    assert any(row.split()[:3] == ["unreadable", "1", "evaluations,"] for row in rows)
    announce(fake_broker, "node-1", "good", {"address": "tcp://127.0.0.1:1"})
    redis.hset(key("relays:node-1"), "odd", odd)
    assert [relay["name"] for relay in nearby(fake_broker, "node-1")] == ["good"]


def test_neighbours_find_the_relays_that_live_and_others_do_not(broker: Broker) -> None:
    announce(broker, "node-1", "b", {"address": "tcp://127.0.0.1:2", "snapshot": "ab-3"})
    announce(broker, "node-1", "a", {"address": "tcp://127.0.0.1:1"})
    announce(broker, "node-2", "c", {"address": "tcp://127.0.0.1:3"})
    long_ago = {"name": "dead", "address": "tcp://127.0.0.1:2", "at": time.time() - 3600}
    broker.redis.hset(broker.key("relays:node-1"), "dead", msgpack.packb(long_ago))
    assert nearby(broker, "node-1") == [
        {"name": "a", "address": "tcp://127.0.0.1:1"},
        {"name": "b", "address": "tcp://127.0.0.1:2", "snapshot": "ab-3"},
    ]
    assert nearby(broker, "node-3") == []
    assert 0 < broker.redis.pttl(broker.key("relays:node-1")) <= 1000 * broker.dead_after
    withdraw(broker, "node-1", "a")
    assert [relay["name"] for relay in nearby(broker, "node-1")] == ["b"]


def test_a_machine_is_called_as_configured_or_by_its_host_name() -> None:
    assert machine_name(WeightsConfig()) == socket.gethostname()
    assert machine_name(WeightsConfig(host="node-1")) == "node-1"
