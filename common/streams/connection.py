"""Connections to Redis: one server, or the master that sentinels name; how long calls wait, and what is refused."""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterator
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

import redis
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.exceptions import (
    AuthenticationError,
    ClusterDownError,
    ConnectionError,
    InvalidResponse,
    MasterDownError,
    MovedError,
    NoPermissionError,
    RedisError,
    ResponseError,
    TimeoutError,
)
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, Sentinel, SentinelManagedConnection, SentinelManagedSSLConnection

from common.config import BrokerConfig
from common.config.redis_url import FORM, SentinelUrl, names_sentinels
from common.errors import UserError
from common.files import read_secret
from common.network import is_loopback, without_password

LOOK_EVERY = 0.1  # seconds
# A sentinel that does not answer must not use up the time in which the others could.
SENTINEL_TIMEOUT = 2.0
# Answers of a server that is not the master, or has lost its replicas; nothing was written then. Within a script
# Redis 6.2 quotes the code in an error of another kind.
NOT_THE_MASTER = ("READONLY", "UNBLOCKED", "NOREPLICAS")
# Options of redis-py that change what is sent and read: messages are bytes, and names are UTF-8.
TEXT_OPTIONS = ("decode_responses", "encoding", "encoding_errors")
CA = "name the certificate that signed it, with ?ssl_ca_certs=FILE after the address"


class Patience(ExponentialBackoff):
    """The pauses between a client's retries; once `end` was called there are no more retries.

    Retrying ends by itself only after `broker.wait` seconds and more; Ctrl-C must end it at once.
    """

    def __init__(self) -> None:
        super().__init__(cap=1.0, base=0.05)
        self._ended = False

    def end(self) -> None:
        """From now on a call that fails is not repeated. Safe in a signal handler: it takes no lock."""
        self._ended = True

    def compute(self, failures: int) -> float:
        """Wait before the n-th retry; returns 0: the caller need not wait too. Raises `ConnectionError` after `end`."""
        until = time.monotonic() + super().compute(failures)
        while not self._ended and (left := until - time.monotonic()) > 0:
            time.sleep(min(LOOK_EVERY, left))
        if self._ended:
            raise ConnectionError("Redis does not answer, and this process was told to stop")
        return 0.0

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # Each connection copies its retries, and `end` must reach all of them.
        return self


class MasterConnection(SentinelManagedConnection):
    """A connection to the current master.

    redis-py asks the sentinels when a connection is taken from the pool, but not when a call is repeated after its
    connection broke: all its retries would go to the dead master.
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
    """A connection to the current master with TLS."""


def client(config: BrokerConfig, **options: Any) -> redis.Redis:
    """A client of the server, or of the sentinels' master; raises `ValueError` if the address is invalid."""
    if config.password_file is not None:
        options["password"] = read_secret(config.password_file, "broker.password_file")
    if not config.url.startswith("unix://"):
        options |= {"socket_connect_timeout": 5, "socket_keepalive": True}
    if not names_sentinels(config.url):
        if unfit := [name for name in TEXT_OPTIONS if name in parse_qs(urlsplit(config.url).query)]:
            raise ValueError(
                f"the option {unfit[0]} cannot be used: messages are bytes, and names are UTF-8; remove it"
            )
        return redis.Redis.from_url(config.url, **options)
    return _master(SentinelUrl.parse(config.url), **options)


def wait_for_server(config: BrokerConfig, run: str, url: str, log: Any) -> str:
    """The server's version, as soon as it answers.

    Args:
        run: one of its keys is read, so that an ACL without the run's keys is refused here.
        url: the address without a password, for messages.

    Raises:
        UserError: no server answers within `config.wait` seconds, or it refuses this client.
    """
    probe = client(config, socket_timeout=5, retry=Retry(NoBackoff(), 0))
    deadline, logged = time.monotonic() + config.wait, False
    while True:
        try:
            server_version = str(probe.info("server").get("redis_version", "0"))
            probe.exists(f"spo:{{{run}}}:release")
            return server_version
        except (AuthenticationError, InvalidResponse) as error:
            raise UserError(f"broker.url {url}: {_refusal(error)}") from None
        except (ConnectionError, TimeoutError) as error:
            if reason := _certificate_refusal(error) or _sentinel_refusal(error, probe):
                raise UserError(f"broker.url {url}: {reason}") from None
            # A server that does not speak Redis' protocol gets here too: it closes the connection each time.
            if time.monotonic() >= deadline:
                reason = _failure_reason(error, probe)
                raise UserError(
                    f"no Redis at {url} after {config.wait:g} s ({reason}); start one, or set broker.url"
                ) from None
            if not logged and log is not None:
                log.info("waiting for redis", url=url)
            logged = True
            time.sleep(0.2)
        except RedisError as error:
            raise UserError(f"broker.url {url}: {_refusal(error)}") from None
        except UnicodeError as error:
            raise UserError(f"broker.url {url}: not a host name ({error})") from None
        except (TypeError, AttributeError) as error:  # of redis-py, which passes every option to its connections
            tls = "; those of TLS need rediss://" if "'ssl_" in str(error) else ""
            raise UserError(f"broker.url {url}: an option after the ? cannot be used ({error}){tls}") from None
        finally:
            probe.close()


def risks(config: BrokerConfig, *, on_this_machine: bool = True) -> Iterator[str]:
    """One line for each security risk of the configured connection to Redis.

    Args:
        on_this_machine: whether to name the risks of a server on a loopback address too.
    """
    if config.url.startswith("unix://"):
        return
    parts, options = urlsplit(config.url), parse_qs(urlsplit(config.url).query)
    url = without_password(config.url)
    if names_sentinels(config.url):
        local = all(is_loopback(host) for host, _ in SentinelUrl.parse(config.url).sentinels)
        password = False
    else:
        local, password = is_loopback(parts.hostname or "localhost"), bool(parts.password or "password" in options)
    if local and not on_this_machine:
        return
    # A server that checks certificates of its clients needs no password.
    if not (password or config.password_file or "ssl_certfile" in options):
        readers = "every account of this machine" if local else "everybody who reaches it over the network"
        yield (
            f"Redis at {url} asks for no password: {readers} can read prompts and answers, inject samples, end the run "
            "and make Redis write files; give it one (requirepass, or an ACL user) and name it by broker.password_file"
        )
    if not local and not parts.scheme.startswith("rediss"):
        yield (
            f"Redis at {url} is reached without TLS: anybody on the way can read prompts, answers and the password, "
            "and change samples; use rediss:// (rediss+sentinel://), or keep it on a network that others cannot reach"
        )


def _master(url: SentinelUrl, **options: Any) -> redis.Redis:
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


def _refusal(error: Exception) -> str:
    if isinstance(error, NoPermissionError):
        return f"the server's ACL lets this user do less than SPO needs ({error}); docs/security.md has a rule for it"
    if isinstance(error, AuthenticationError) or "NOAUTH" in str(error):
        return (
            "the server requires a password, or another one; name a file with it as broker.password_file, or, for one "
            "server, write it as redis://:PASSWORD@host:port/0"
        )
    if isinstance(error, (MovedError, ClusterDownError)):
        return (
            f"this is a node of a Redis Cluster that does not hold the run ({error}); Cluster is not supported: use "
            f"one server (redis://host:port/0), or one that fails over ({FORM})"
        )
    return f"not a usable Redis server ({error})"


def _certificate_refusal(error: BaseException) -> str | None:
    """What is wrong with the certificates; None for an error of another kind."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"the server's certificate is refused ({cause.verify_message}); {CA}"
        if isinstance(cause, ssl.SSLError) and "ALERT" in (cause.reason or ""):
            return f"the server refuses our side of TLS ({cause.reason}); it may require ssl_certfile and ssl_keyfile"
        cause = cause.__cause__ or cause.__context__
    return None


def _failure_reason(error: Exception, client: redis.Redis) -> str:
    """Why there is no connection: for a client of sentinels, which of them do not answer and with what error."""
    if not isinstance(error, MasterNotFoundError):
        return str(error)
    reasons = [str(error).partition(" : ")[0]]
    reasons += [f"sentinel {where}: {refusal}" for where, refusal in _failures(client) if refusal is not None]
    return "; ".join(reasons)


def _sentinel_refusal(error: Exception, client: redis.Redis) -> str | None:
    """What is wrong with the certificates, if that is why no sentinel can be reached; else None."""
    if not isinstance(error, MasterNotFoundError):
        return None
    reasons = [_certificate_refusal(refusal) if refusal is not None else None for _, refusal in _failures(client)]
    return reasons[0] if all(reasons) else None


def _failures(client: redis.Redis) -> Iterator[tuple[str, RedisError | None]]:
    """Host and port of each sentinel, and its error, if it does not answer."""
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
