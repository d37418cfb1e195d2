"""Relays are found by their own machine's processes, for as long as they live."""

from __future__ import annotations

import socket
import time

import msgpack

from common.config import WeightsConfig
from common.streams.broker import Broker
from common.streams.relays import announce, machine_name, nearby, withdraw


def test_neighbours_find_a_relay_and_others_do_not(broker: Broker) -> None:
    announce(broker, "node-1", "b", {"address": "tcp://127.0.0.1:2", "snapshot": "ab-3"})
    announce(broker, "node-1", "a", {"address": "tcp://127.0.0.1:1"})
    announce(broker, "node-2", "c", {"address": "tcp://127.0.0.1:3"})
    assert nearby(broker, "node-1") == [
        {"name": "a", "address": "tcp://127.0.0.1:1"},
        {"name": "b", "address": "tcp://127.0.0.1:2", "snapshot": "ab-3"},
    ]
    assert nearby(broker, "node-3") == []


def test_a_relay_that_leaves_is_gone_at_once(broker: Broker) -> None:
    announce(broker, "node-1", "a", {"address": "tcp://127.0.0.1:1"})
    announce(broker, "node-1", "b", {"address": "tcp://127.0.0.1:2"})
    withdraw(broker, "node-1", "a")
    assert [relay["name"] for relay in nearby(broker, "node-1")] == ["b"]


def test_a_relay_that_beats_no_more_disappears_beside_one_that_lives(broker: Broker) -> None:
    announce(broker, "node-1", "alive", {"address": "tcp://127.0.0.1:1"})
    long_ago = {"name": "dead", "address": "tcp://127.0.0.1:2", "at": time.time() - 3600}
    broker.redis.hset(broker.key("relays:node-1"), "dead", msgpack.packb(long_ago))
    assert [relay["name"] for relay in nearby(broker, "node-1")] == ["alive"]


def test_of_a_machine_without_a_living_relay_nothing_stays(broker: Broker) -> None:
    announce(broker, "node-1", "a", {"address": "tcp://127.0.0.1:1"})
    left = broker.redis.pttl(broker.key("relays:node-1"))
    assert 0 < left <= 1000 * broker.dead_after


def test_a_machine_is_called_as_configured_or_by_its_host_name() -> None:
    assert machine_name(WeightsConfig()) == socket.gethostname()
    assert machine_name(WeightsConfig(host="node-1")) == "node-1"
