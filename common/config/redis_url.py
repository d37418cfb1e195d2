"""Addresses of Redis: one server's, or redis+sentinel://HOST:PORT,HOST:PORT,.../SERVICE/DB of one that fails over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote, urlsplit

from common.errors import UserError
from common.network import without_password

SCHEME = "redis+sentinel://"
TLS_SCHEME = "rediss+sentinel://"
FORM = f"{SCHEME}HOST:PORT,HOST:PORT,.../SERVICE/DB"
DEFAULT_PORT = 26379
TLS_OPTIONS = ("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile", "ssl_password", "ssl_check_hostname")


def names_sentinels(url: str) -> bool:
    return url.startswith((SCHEME, TLS_SCHEME))


@dataclass(frozen=True, slots=True)
class SentinelUrl:
    """The sentinels to ask for the master, and the master's name."""

    sentinels: tuple[tuple[str, int], ...]  # host and port of each
    service: str  # the name that the sentinels have for the master and its replicas
    db: int = 0  # number of the database
    # The sentinels' account, and its password; `broker.password_file` has the data servers' password.
    user: str | None = None
    password: str | None = None
    # Options of redis-py for certificates, the same for sentinels and data servers; None without TLS.
    tls: Mapping[str, str | bool] | None = None

    @classmethod
    def parse(cls, url: str) -> SentinelUrl:
        """Read an address that `names_sentinels`; raises `ValueError`, which says why it is not valid.

        Port and database may be left out.
        """
        address, _, options = url.partition("?")
        scheme, _, rest = address.partition("://")
        authority, _, path = rest.partition("/")
        tls = _tls(options) if f"{scheme}://" == TLS_SCHEME else None
        if options and tls is None:
            raise ValueError(f"options (after a ?) are for TLS only, with {TLS_SCHEME}")
        login, _, hosts = authority.rpartition("@")
        user, _, password = login.partition(":")
        service, _, db = path.partition("/")
        if not service:
            raise ValueError("it names no SERVICE, the sentinels' name for the master")
        if not (db or "0").isdecimal():
            raise ValueError(f"DB {db!r} is not a number")
        return cls(
            tuple(_host_and_port(host) for host in hosts.split(",")),
            unquote(service),
            int(db or 0),
            unquote(user) or None,
            unquote(password) or None,
            tls,
        )


def _tls(options: str) -> dict[str, str | bool]:
    values: dict[str, str | bool] = {}
    for name, value in parse_qsl(options, keep_blank_values=True):
        if name not in TLS_OPTIONS:
            raise ValueError(f"option {name!r} is not one of {', '.join(TLS_OPTIONS)}")
        if name == "ssl_check_hostname":
            if value.lower() not in ("true", "false"):
                raise ValueError(f"{name}={value} must be true or false")
            values[name] = value.lower() == "true"
        else:
            values[name] = value
    return values


def _host_and_port(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):  # no port, or the last colon is one of an IPv6 address
        host, port = text, str(DEFAULT_PORT)
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{text!r} is not HOST:PORT")
    return host, int(port)


def check_queue(url: str, key: str = "broker.url") -> None:
    """Raise `UserError` if the value of `key` cannot be an address of Redis."""
    # An address without a scheme may have a password too.
    shown = without_password(url) if "://" in url else without_password(f"://{url}").removeprefix("://")
    if names_sentinels(url):
        try:
            SentinelUrl.parse(url)
        except ValueError as error:
            raise UserError(f"{key} = {shown!r}: {error}; it must be of the form {FORM}") from None
    elif not url.startswith(("redis://", "rediss://", "unix://")):
        hint = "" if "://" in url else f"; did you mean {_with_scheme(shown)}?"
        raise UserError(
            f"{key} = {shown!r} must start with redis://, rediss://, unix://, {SCHEME} or {TLS_SCHEME}{hint}"
        )
    elif not has_port(url):
        raise UserError(
            f"{key} = {shown!r} has no valid port; in a password, / ? # and @ are written %2F %3F %23 and %40"
        )


def _with_scheme(text: str) -> str:
    """The address of Redis for a host, or for the path of a socket."""
    if text.startswith("/"):
        return f"unix://{text}"
    return f"redis://{text}" if "/" in text else f"redis://{text}/0"


def has_port(url: str) -> bool:
    """True if the port is from 1 to 65535, or left out; a slash in a password would put other text in its place."""
    try:
        return urlsplit(url).port != 0
    except ValueError:
        return False
