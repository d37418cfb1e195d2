"""Redis as a run needs it: reachable, of one release for all, and losing nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from redis.exceptions import RedisError
from redis.sentinel import SentinelConnectionPool

from common.config import Config
from common.doctor.case import mib
from common.doctor.finding import Finding, ok, problem, warning
from common.errors import UserError
from common.streams.broker import Broker, connect

SKEW = 2.0  # seconds between clocks, from where files of different machines are hard to read side by side
FULL = 0.8  # of maxmemory


def queue(config: Config) -> tuple[list[Finding], Broker | None]:
    """All findings about the run's Redis, and the connection where there is one."""
    found: list[Finding] = []
    try:
        broker = connect(config.broker.model_copy(update={"wait": 0.0}), config.run.name)
        info = broker.redis.info()
        found.append(ok("redis", f"{info['redis_version']} answers at {_address(broker)}"))
        for check in (_persistence, _memory):
            found.append(check(info))
        if isinstance(broker.redis.connection_pool, SentinelConnectionPool):
            found.append(_replicas(info))
        found += _run(broker, config)
        found.append(_clock(broker))
    except UserError as error:
        return [*found, problem("redis", str(error))], None
    except RedisError as error:
        return [*found, problem("redis", f"it refuses what SPO asks of it: {error}")], None
    return found, broker


def _persistence(info: dict[str, Any]) -> Finding:
    name = "redis: disk"
    if not info.get("aof_enabled"):
        return warning(
            name, "its append-only file is off: when Redis dies, samples are lost; start it with --appendonly yes"
        )
    if info.get("aof_last_write_status", "ok") != "ok":
        return problem(name, "its last write to the append-only file failed: make room on its disk")
    return ok(name, "its append-only file is on")


def _memory(info: dict[str, Any]) -> Finding:
    name, used, limit = "redis: memory", int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    policy = info.get("maxmemory_policy", "noeviction")
    if limit and policy != "noeviction":
        return problem(
            name,
            f"maxmemory-policy is {policy}: beyond maxmemory = {mib(limit)} Redis would drop samples; start it with "
            "--maxmemory-policy noeviction",
        )
    if limit and used > FULL * limit:
        return warning(
            name, f"{mib(used)} of maxmemory = {mib(limit)} are used: raise it, or lower learner.checkpoint_every"
        )
    return ok(name, f"{mib(used)} used, {f'maxmemory = {mib(limit)}' if limit else 'no maxmemory'}, nothing is evicted")


def _replicas(info: dict[str, Any]) -> Finding:
    name, replicas = "redis: replicas", int(info.get("connected_slaves", 0))
    if not replicas:
        return warning(name, "the master has none: sentinels have nothing to fail over to; start a replica of it")
    return ok(name, f"{replicas} of the master; a fail-over may lose what they had not yet received")


def _run(broker: Broker, config: Config) -> Iterator[Finding]:
    name = "run"
    try:
        known = broker.compare(config)
    except UserError as error:
        yield problem(name, str(error))
        return
    if broker.finished():
        yield warning(name, f"run {broker.run!r} is finished: a process that starts leaves at once; choose a run.name")
    else:
        yield ok(
            name,
            f"{broker.run!r} has this release and configuration" if known else f"{broker.run!r} has not begun there",
        )


def _clock(broker: Broker) -> Finding:
    before = time.time()
    seconds, micros = broker.redis.time()
    after = time.time()
    there = seconds + micros / 1e6
    # Somewhere between asking and the answer: what is outside is certain.
    off = there - min(max(there, before), after)
    if abs(off) > SKEW:
        return warning(
            "clock",
            f"Redis' clock is {abs(off):.1f} s {'ahead of' if off > 0 else 'behind'} this machine's: log lines and "
            "curves of different machines do not line up; set both by NTP",
        )
    return ok("clock", "Redis' and this machine's agree")


def _address(broker: Broker) -> str:
    pool = broker.redis.connection_pool
    if isinstance(pool, SentinelConnectionPool):
        host, port = pool.master_address
        return f"{host}:{port}, master of {pool.service_name}"
    made = pool.connection_kwargs
    return str(made.get("path") or f"{made.get('host', 'localhost')}:{made.get('port', 6379)}")
