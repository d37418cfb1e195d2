"""A client of the current master: sentinels are asked at every connection, also when a call is repeated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError, MasterDownError, RedisError, ResponseError
from redis.retry import Retry
from redis.sentinel import (
    MasterNotFoundError,
    Sentinel,
    SentinelManagedConnection,
    SentinelManagedSSLConnection,
)

from common.config.redis_url import SentinelUrl
from common.streams import tls

# A sentinel that does not answer must not use up the time in which the others could.
SENTINEL_TIMEOUT = 2.0
# Answers of a server that is not the master, or has lost its replicas; nothing was written then. Within a script
# Redis 6.2 quotes the code in an error of another kind.
NOT_THE_MASTER = ("READONLY", "UNBLOCKED", "NOREPLICAS")


class MasterConnection(SentinelManagedConnection):
    """A connection to the current master.

    redis-py asks the sentinels when a connection is taken from the pool, but a call that is repeated after its
    connection broke would go to the old address, and all its retries to the dead master.
    """

    connection_pool: Any
    _sock: Any

    def connect(self) -> None:
        """Connect, with the retries of the client."""
        self.retry.call_with_retry(self.connect_check_health, lambda error: None)

    def connect_check_health(self, check_health: bool = True, retry_socket_connect: bool = True) -> None:
        """One attempt: ask for the master, then connect to it. Only the call that needs the connection retries."""
        if self._sock:
            return
        self.host, self.port = self.connection_pool.get_master_address()
        super().connect_check_health(check_health, retry_socket_connect=False)

    def read_response(self, *args: Any, **options: Any) -> Any:
        """Read a response; an error that the server is not the master counts as a broken connection: it is retried."""
        try:
            return super().read_response(*args, **options)
        except ResponseError as error:
            if not isinstance(error, MasterDownError) and not any(word in str(error) for word in NOT_THE_MASTER):
                raise
            self.disconnect()
            raise ConnectionError(f"no master that can be written to ({error})") from None


class TlsMasterConnection(MasterConnection, SentinelManagedSSLConnection):
    """The same with TLS."""


def client(url: SentinelUrl, **options: Any) -> redis.Redis:
    """A client of the master; `options` are those of its connections."""
    certificates = dict(url.tls or {})
    sentinel_options = {
        "username": url.user,
        "password": url.password,
        "socket_timeout": SENTINEL_TIMEOUT,
        "socket_connect_timeout": SENTINEL_TIMEOUT,
        "retry": Retry(NoBackoff(), 0),
        "ssl": url.tls is not None,
        **certificates,
    }
    sentinel = Sentinel(url.sentinels, sentinel_kwargs=sentinel_options)
    connection = MasterConnection if url.tls is None else TlsMasterConnection
    master: redis.Redis = sentinel.master_for(
        url.service, connection_class=connection, db=url.db, **certificates, **options
    )
    return master


def failure_reason(error: Exception, client: redis.Redis) -> str:
    """Why there is no connection: for a client of sentinels, which of them do not answer and with what error."""
    if not isinstance(error, MasterNotFoundError):
        return str(error)
    reasons = [str(error).partition(" : ")[0]]
    reasons += [f"sentinel {where}: {refusal}" for where, refusal in _failures(client) if refusal is not None]
    return "; ".join(reasons)


def tls_refusal(error: Exception, client: redis.Redis) -> str | None:
    """What is wrong with the certificates where no sentinel can be talked to for that reason; else None."""
    if not isinstance(error, MasterNotFoundError):
        return None
    reasons = [tls.refusal(refusal) if refusal is not None else None for _, refusal in _failures(client)]
    return reasons[0] if all(reasons) else None


def _failures(client: redis.Redis) -> Iterator[tuple[str, RedisError | None]]:
    """Host and port of each sentinel, and how talking to it fails."""
    pool: Any = client.connection_pool
    for sentinel in pool.sentinel_manager.sentinels:
        options = sentinel.connection_pool.connection_kwargs
        where = f"{options['host']}:{options['port']}"
        try:
            sentinel.ping()
        except RedisError as refusal:
            yield where, refusal
        else:
            yield where, None
