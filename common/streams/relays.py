"""Relays of the weights, machine by machine: each announces itself with its heartbeats, and is found by its neighbours.

A key for each machine, because every generator asks every few seconds: of a thousand processes it should read a line.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping

import msgpack

from common.config import WeightsConfig
from common.streams.broker import Broker


def host_of(config: WeightsConfig) -> str:
    """What this machine is called among relays and generators."""
    return config.host or socket.gethostname()


def announce(broker: Broker, host: str, name: str, endpoint: Mapping[str, str]) -> None:
    """Tell the processes on `host` where a relay of theirs serves; holds for `broker.dead_after` seconds."""
    key = broker.key(f"relays:{host}")
    seconds, micros = broker.redis.time()
    pipe = broker.redis.pipeline()
    pipe.hset(key, name, msgpack.packb({**endpoint, "name": name, "at": seconds + micros / 1e6}))
    pipe.pexpire(key, int(broker.dead_after * 1000))
    pipe.execute()


def withdraw(broker: Broker, host: str, name: str) -> None:
    """A relay leaves."""
    broker.redis.hdel(broker.key(f"relays:{host}"), name)


def nearby(broker: Broker, host: str) -> list[dict[str, str]]:
    """Living relays on `host`, by name: `name` and what `announce` was given."""
    pipe = broker.redis.pipeline(transaction=False)
    pipe.time()
    pipe.hgetall(broker.key(f"relays:{host}"))
    (seconds, micros), told = pipe.execute()
    now = seconds + micros / 1e6
    found = [msgpack.unpackb(data) for _, data in sorted(told.items())]
    return [relay for relay in found if now - relay.pop("at") < broker.dead_after]
