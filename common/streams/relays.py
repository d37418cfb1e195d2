"""Relays of the weights, by machine: each announces itself with its heartbeats, for the generators of its machine.

There is a key for each machine because every generator asks every few seconds, and should not read the entries of a
thousand other processes.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping

import msgpack
from pydantic import ConfigDict, TypeAdapter
from typing_extensions import TypedDict

from common.config import WeightsConfig
from common.streams.broker import Broker, read_published


class RelayEntry(TypedDict):
    """Where a relay serves weights, and when it announced that, in seconds of Redis' clock."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    name: str
    address: str
    at: float


_RELAY = TypeAdapter(RelayEntry)


def machine_name(config: WeightsConfig) -> str:
    """The name under which relays and generators of this machine find each other."""
    return config.host or socket.gethostname()


def announce(broker: Broker, host: str, name: str, endpoint: Mapping[str, str]) -> None:
    """Publish where a relay on `host` serves; holds for `broker.dead_after` seconds."""
    seconds, micros = broker.redis.time()
    entry = msgpack.packb({**endpoint, "name": name, "at": seconds + micros / 1e6})
    broker.call("relay", [f"relays:{host}"], [name, entry, int(broker.dead_after * 1000)])


def withdraw(broker: Broker, host: str, name: str) -> None:
    broker.redis.hdel(broker.key(f"relays:{host}"), name)


def nearby(broker: Broker, host: str) -> list[dict[str, str]]:
    """Living relays on `host`, by name: `name` and the endpoint each announced. Unreadable entries are left out."""
    pipe = broker.redis.pipeline(transaction=False)
    pipe.time()
    pipe.hgetall(broker.key(f"relays:{host}"))
    (seconds, micros), entries = pipe.execute()
    now = seconds + micros / 1e6
    relays = [read_published(_RELAY, data) for _, data in sorted(entries.items())]
    return [relay for relay in relays if relay is not None and abs(now - relay.pop("at")) < broker.dead_after]
