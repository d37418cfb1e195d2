"""The services around a run: its Redis, and the sandbox in which programs run."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Iterator
from http.client import HTTPException
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from redis.exceptions import RedisError
from redis.sentinel import SentinelConnectionPool

from common.checks.check import Context, Finding, ok, problem, warning
from common.checks.machine import format_bytes
from common.config import Config, TeacherConfig
from common.errors import UserError
from common.files import read_secret
from common.network import is_loopback_url, without_password
from common.streams.agreement import compare
from common.streams.broker import NOEVICTION, Broker, Memory, connect
from common.streams.connection import risks
from common.streams.early_stop import to_continue

MAX_SKEW = 2.0  # seconds; with more, logs of different machines are hard to compare
NEARLY_FULL = 0.8  # share of maxmemory in use
TIMEOUT = 5.0  # seconds for the sandbox to answer
# SPO's tools and rewards that run programs. Users' own may do so too; a generator checks those when it starts.
RUN_PROGRAMS = {"code_interpreter", "code"}


def redis(context: Context) -> Iterator[Finding]:
    """Whether Redis answers, keeps data on disk, and agrees on the run's release and configuration."""
    config = context.config
    try:
        broker = connect(config.broker.model_copy(update={"wait": 0.0}), config.run.name)
        info = broker.redis.info()
        yield ok(f"{info['redis_version']} answers at {_address(broker)}")
        yield _persistence(info)
        yield _memory(info)
        if isinstance(broker.redis.connection_pool, SentinelConnectionPool):
            yield _replicas(info)
        yield _run(broker, config)
        yield _clock(broker)
        for risk in risks(config.broker):
            yield warning(risk, "redis: access")
    except UserError as error:
        yield problem(str(error))
    except RedisError as error:
        yield problem(f"it refuses what SPO asks of it: {error}")


def _persistence(info: dict[str, Any]) -> Finding:
    name = "redis: disk"
    if not info.get("aof_enabled"):
        return warning(
            "its append-only file is off: when Redis dies, samples are lost; start it with --appendonly yes", name
        )
    if info.get("aof_last_write_status", "ok") != "ok":
        return problem("its last write to the append-only file failed: make room on its disk", name)
    return ok("its append-only file is on", name)


def _memory(info: dict[str, Any]) -> Finding:
    name, used, limit = "redis: memory", int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    if refusal := Memory(used, limit, info.get("maxmemory_policy", NOEVICTION)).refusal:
        return problem(refusal, name)
    if limit and used > NEARLY_FULL * limit:
        return warning(
            f"{format_bytes(used)} of maxmemory = {format_bytes(limit)} are used: raise it, or lower "
            "learner.checkpoint_every",
            name,
        )
    maxmemory = f"maxmemory = {format_bytes(limit)}" if limit else "no maxmemory"
    return ok(f"{format_bytes(used)} used, {maxmemory}, nothing is evicted", name)


def _replicas(info: dict[str, Any]) -> Finding:
    name, replicas = "redis: replicas", int(info.get("connected_slaves", 0))
    if not replicas:
        return warning("the master has none: sentinels have nothing to fail over to; start a replica of it", name)
    return ok(f"{replicas} of the master; a fail-over may lose what they had not yet received", name)


def _run(broker: Broker, config: Config) -> Finding:
    name = "run"
    try:
        changes = compare(broker, config)
    except UserError as error:
        return problem(str(error), name)
    if changes:
        listed = ", ".join(map(str, changes))
        return warning(f"{broker.run!r} has another configuration, which starting a process changes: {listed}", name)
    if broker.finished():
        return warning(
            f"run {broker.run!r} is finished, so a process that starts exits at once; "
            f"{to_continue(broker, config.run)}, or choose another run.name",
            name,
        )
    begun = changes is not None
    return ok(
        f"{broker.run!r} has this release and configuration" if begun else f"{broker.run!r} has not begun there", name
    )


def _clock(broker: Broker) -> Finding:
    before = time.time()
    seconds, micros = broker.redis.time()
    after = time.time()
    server = seconds + micros / 1e6
    # Redis read its clock between the two, so only a time outside them shows a difference.
    skew = server - min(max(server, before), after)
    if abs(skew) > MAX_SKEW:
        return warning(
            f"Redis' clock is {abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} this machine's: log lines and "
            "curves of different machines do not match; synchronise both by NTP",
            "clock",
        )
    return ok("Redis' and this machine's agree", "clock")


def _address(broker: Broker) -> str:
    pool = broker.redis.connection_pool
    if isinstance(pool, SentinelConnectionPool):
        host, port = pool.master_address
        return f"{host}:{port}, master of {pool.service_name}"
    options = pool.connection_kwargs
    return str(options.get("path") or f"{options.get('host', 'localhost')}:{options.get('port', 6379)}")


def sandbox(context: Context) -> Finding | None:
    """Whether the sandbox at `sandbox.url` answers, accepts our token, and isolates programs."""
    config = context.config
    url = config.sandbox.url
    if url is None:
        return None
    finding = problem if runs_programs(config) else warning
    base = url.rstrip("/").removesuffix("/run_code")
    shown = without_password(base)
    token = _token(config, context)
    try:
        status, body = _get(f"{base}/health", None, direct=True)
        if status != 200:
            return finding(f"{shown} answers /health with {status}; it is stopping, or is not an spo-sandbox")
        isolated = json.loads(body).get("isolated")
        status, _ = _get(f"{base}/metrics", token, direct=True)
    except (OSError, HTTPException, ValueError, AttributeError) as error:
        reason = getattr(error, "reason", None) or error
        return finding(f"{shown} does not answer ({reason}); start it (spo-sandbox), or set sandbox.url")
    if status == 401:
        reason = "the given one is wrong" if token else "none is given"
        return problem(f"{shown} asks for a token, but {reason}: name its file as sandbox.token_file")
    if status == 403:
        return problem(
            f"{shown} has no token, so it answers only at localhost or 127.0.0.1; use that name, or give it a token"
        )
    if not isolated:
        return warning(f"{shown} runs programs without isolation: start it without -o isolated=false")
    return ok(f"{shown} isolates programs" + (", and accepts the token" if token else ""))


def teacher_servers(context: Context) -> Iterator[Finding]:
    """Whether each server at a `teacher.url` answers, and serves the model."""
    for teacher in context.config.teachers_in_use().values():
        if teacher.url is not None:
            yield _teacher_server(context, teacher, teacher.url)


def _teacher_server(context: Context, teacher: TeacherConfig, url: str) -> Finding:
    url, key = url.rstrip("/"), None
    if teacher.api_key_env is not None:
        key = context.machine.environ.get(teacher.api_key_env)
        if not key:
            return problem(f"teacher.api_key_env names {teacher.api_key_env}, but there is no such variable here")
        _check_header(key, f"{teacher.api_key_env}, which teacher.api_key_env names,")
    shown = without_password(url)
    try:
        status, body = _get(f"{url}/models", key, direct=is_loopback_url(url))
        if status in (401, 403):
            return problem(
                f"{shown} refuses {'the key' if key else 'to answer without a key'}: see teacher.api_key_env"
            )
        names = [model["id"] for model in json.loads(body)["data"]] if status == 200 else []
    except (OSError, HTTPException, ValueError, KeyError, TypeError) as error:
        reason = getattr(error, "reason", None) or error
        return problem(f"teacher.url = {shown} does not answer ({reason}); start the server, or set teacher.model")
    if not names:
        return problem(f"{shown}/models answers with {status} and no model; teacher.url is an address up to /v1")
    if teacher.url_model is not None and teacher.url_model not in names:
        return problem(
            f"{shown} serves {', '.join(names)}; teacher.url_model = {teacher.url_model!r} is not among them"
        )
    return ok(f"{shown} serves {teacher.url_model or names[0]}")


def runs_programs(config: Config) -> bool:
    """Whether a tool or a reward of SPO's runs programs."""
    names: set[str] = set()
    for episode in config.episodes_in_use().values():
        names |= {*episode.tools, *episode.reward_weights}
    return bool(RUN_PROGRAMS & names)


def _token(config: Config, context: Context) -> str | None:
    if config.sandbox.token_file is not None:
        token, name = read_secret(config.sandbox.token_file, "sandbox.token_file"), "sandbox.token_file"
    elif config.sandbox.token:
        token, name = config.sandbox.token, "sandbox.token"
    else:
        token, name = context.machine.environ.get("SPO_SANDBOX_TOKEN", ""), "SPO_SANDBOX_TOKEN"
    _check_header(token, name)
    return token or None


def _check_header(secret: str, name: str) -> None:
    """Raise `UserError` for a secret that no header can carry, without showing it, as urllib's error would."""
    if not (secret.isascii() and secret.isprintable()):
        raise UserError(f"{name} holds no token: it must be printable ASCII, without a line break")


def _get(url: str, token: str | None, *, direct: bool) -> tuple[int, bytes]:
    """Status and body, directly or through the environment's proxy; raises `OSError` if there is no answer."""
    headers, parts = {"Authorization": f"Bearer {token}"} if token else {}, urlsplit(url)
    if "@" in parts.netloc:  # urllib would take user and password for a part of the host's name
        login, _, host = parts.netloc.rpartition("@")
        headers = {"Authorization": f"Basic {b64encode(unquote(login).encode()).decode()}"}
        url = urlunsplit(parts._replace(netloc=host))
    request = urllib.request.Request(url, headers=headers)
    try:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({} if direct else None))
        with opener.open(request, timeout=TIMEOUT) as answer:
            return answer.status, answer.read(1 << 16)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, b""
