"""A client of whichever server is the master: sentinels are asked at every connection, also in the middle of a call."""

from __future__ import annotations

from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError, MasterDownError, RedisError, ResponseError
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, Sentinel, SentinelManagedConnection

from common.config.sentinel_url import SentinelUrl

# A sentinel that does not answer must not use up the time in which the others could.
SENTINEL_TIMEOUT = 2.0
# What a server answers that is no master (any more), or has lost its replicas; nothing was written then. Within a
# script Redis 6.2 quotes the code in an error of another kind.
NOT_THE_MASTER = ("READONLY", "UNBLOCKED", "NOREPLICAS")


class FollowingConnection(SentinelManagedConnection):
    """A connection to the master of the moment.

    redis-py asks the sentinels when a connection is taken from the pool, but a call that is repeated after its
    connection broke would go to the address of before: for the whole of its patience, to the dead master.
    """

    connection_pool: Any
    _sock: Any

    def connect(self) -> None:
        """Connect, as often as the client's patience allows."""
        self.retry.call_with_retry(self.connect_check_health, lambda error: None)

    def connect_check_health(self, check_health: bool = True, retry_socket_connect: bool = True) -> None:
        """One attempt: ask for the master, then connect to it. The call that needs it has the patience."""
        if self._sock:
            return
        self.host, self.port = self.connection_pool.get_master_address()
        super().connect_check_health(check_health, retry_socket_connect=False)

    def read_response(self, *args: Any, **options: Any) -> Any:
        """As ever, but the answer of a server that is not the master is a broken connection, and so is repeated."""
        try:
            return super().read_response(*args, **options)
        except ResponseError as error:
            if not isinstance(error, MasterDownError) and not any(word in str(error) for word in NOT_THE_MASTER):
                raise
            self.disconnect()
            raise ConnectionError(f"no master that can be written to ({error})") from None


def client(url: SentinelUrl, **options: Any) -> redis.Redis:
    """A client of the master; `options` are those of its connections."""
    asked = {
        "username": url.user,
        "password": url.password,
        "socket_timeout": SENTINEL_TIMEOUT,
        "socket_connect_timeout": SENTINEL_TIMEOUT,
        "retry": Retry(NoBackoff(), 0),
    }
    sentinel = Sentinel(url.sentinels, sentinel_kwargs=asked)
    found: redis.Redis = sentinel.master_for(url.service, connection_class=FollowingConnection, db=url.db, **options)
    return found


def reason(error: Exception, asked: redis.Redis) -> str:
    """Why there is no connection, in few words: which sentinels do not answer, and what they say instead."""
    if not isinstance(error, MasterNotFoundError):
        return str(error)
    said = [str(error).partition(" : ")[0]]
    pool: Any = asked.connection_pool
    for sentinel in pool.sentinel_manager.sentinels:
        try:
            sentinel.ping()
        except RedisError as refusal:
            where = sentinel.connection_pool.connection_kwargs
            said.append(f"sentinel {where['host']}:{where['port']}: {refusal}")
    return "; ".join(said)
