"""Whether Redis answers, keeps what it is given, and has the same release and configuration of the run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from redis.exceptions import RedisError
from redis.sentinel import SentinelConnectionPool

from common.config import Config
from common.errors import UserError
from common.preflight.context import format_bytes
from common.preflight.finding import Finding, ok, problem, warning
from common.streams.agreement import compare
from common.streams.broker import Broker, connect
from common.streams.redis_risks import risks

MAX_SKEW = 2.0  # seconds; with more, logs of different machines are hard to compare
NEARLY_FULL = 0.8  # part of maxmemory in use


def check_redis(config: Config) -> tuple[list[Finding], Broker | None]:
    """All findings about the run's Redis, and the connection if it could be made."""
    findings: list[Finding] = []
    try:
        broker = connect(config.broker.model_copy(update={"wait": 0.0}), config.run.name)
        info = broker.redis.info()
        findings.append(ok("redis", f"{info['redis_version']} answers at {_address(broker)}"))
        findings += [_persistence(info), _memory(info)]
        if isinstance(broker.redis.connection_pool, SentinelConnectionPool):
            findings.append(_replicas(info))
        findings += _run(broker, config)
        findings.append(_clock(broker))
        findings += [warning("redis: access", risk) for risk in risks(config.broker)]
    except UserError as error:
        return [*findings, problem("redis", str(error))], None
    except RedisError as error:
        return [*findings, problem("redis", f"it refuses what SPO asks of it: {error}")], None
    return findings, broker


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
            f"maxmemory-policy is {policy}: beyond maxmemory = {format_bytes(limit)} Redis would drop samples; start "
            "it with --maxmemory-policy noeviction",
        )
    if limit and used > NEARLY_FULL * limit:
        return warning(
            name,
            f"{format_bytes(used)} of maxmemory = {format_bytes(limit)} are used: raise it, or lower "
            "learner.checkpoint_every",
        )
    maxmemory = f"maxmemory = {format_bytes(limit)}" if limit else "no maxmemory"
    return ok(name, f"{format_bytes(used)} used, {maxmemory}, nothing is evicted")


def _replicas(info: dict[str, Any]) -> Finding:
    name, replicas = "redis: replicas", int(info.get("connected_slaves", 0))
    if not replicas:
        return warning(name, "the master has none: sentinels have nothing to fail over to; start a replica of it")
    return ok(name, f"{replicas} of the master; a fail-over may lose what they had not yet received")


def _run(broker: Broker, config: Config) -> Iterator[Finding]:
    name = "run"
    try:
        changes = compare(broker, config)
    except UserError as error:
        yield problem(name, str(error))
        return
    if changes:
        listed = ", ".join(map(str, changes))
        yield warning(name, f"{broker.run!r} has another configuration, which a start changes: {listed}")
    elif broker.finished():
        yield warning(
            name,
            f"run {broker.run!r} is finished: a process that starts leaves at once; raise run.steps, or choose another "
            "run.name",
        )
    else:
        begun = changes is not None
        yield ok(
            name,
            f"{broker.run!r} has this release and configuration" if begun else f"{broker.run!r} has not begun there",
        )


def _clock(broker: Broker) -> Finding:
    before = time.time()
    seconds, micros = broker.redis.time()
    after = time.time()
    server = seconds + micros / 1e6
    # Redis read its clock between the two: only a time outside of them shows a difference.
    skew = server - min(max(server, before), after)
    if abs(skew) > MAX_SKEW:
        return warning(
            "clock",
            f"Redis' clock is {abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} this machine's: log lines and "
            "curves of different machines do not match; synchronise both by NTP",
        )
    return ok("clock", "Redis' and this machine's agree")


def _address(broker: Broker) -> str:
    pool = broker.redis.connection_pool
    if isinstance(pool, SentinelConnectionPool):
        host, port = pool.master_address
        return f"{host}:{port}, master of {pool.service_name}"
    options = pool.connection_kwargs
    return str(options.get("path") or f"{options.get('host', 'localhost')}:{options.get('port', 6379)}")
