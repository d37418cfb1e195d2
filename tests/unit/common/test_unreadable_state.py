"""What another program or release has written under the keys that all read is shown as such, and ends nobody."""

from __future__ import annotations

import io
import time
from typing import Any

import msgpack
import pytest
from rich.console import Console

from common.streams.broker import Broker
from common.streams.presence import Presence
from common.streams.relays import announce, nearby
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
def test_the_views_say_what_cannot_be_read_and_show_the_rest(broker: Broker, odd: bytes) -> None:
    redis, key = broker.redis, broker.key
    Presence(broker, "sampler-1", "sampler").beat()
    redis.hset(key("processes"), b"other\xff", odd)
    redis.zadd(key("alive"), {b"other\xff": time.time() * 1000})
    redis.hset(key("evaluations"), "0", msgpack.packb({"version": 0, "accuracy": 0.25, "samples": 4}))
    redis.hset(key("evaluations"), "1", odd)
    progress = Progress(broker, steps=8)
    assert progress.refresh()
    assert progress.processes["other\ufffd"]["state"] == "unreadable"
    assert [process["state"] for process in progress.of_role("sampler")] == ["starting"]
    assert [result["accuracy"] for result in progress.evaluations] == [0.25]
    assert progress.unreadable_evaluations == 1
    rows = shown(figures(progress), process_rows(progress, {})).splitlines()
    assert any("other" in row and "unreadable" in row for row in rows)
    assert any(row.split()[:3] == ["unreadable", "1", "evaluations;"] for row in rows)


@pytest.mark.parametrize("odd", ODD)
def test_an_entry_that_cannot_be_read_is_no_relay(broker: Broker, odd: bytes) -> None:
    announce(broker, "node-1", "good", {"address": "tcp://127.0.0.1:1"})
    broker.redis.hset(broker.key("relays:node-1"), "odd", odd)
    assert [relay["name"] for relay in nearby(broker, "node-1")] == ["good"]
