"""Addresses of a Redis that fails over: redis+sentinel://HOST:PORT,HOST:PORT,.../SERVICE/DB."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import unquote

SCHEME = "redis+sentinel://"
FORM = f"{SCHEME}HOST:PORT,HOST:PORT,.../SERVICE/DB"
DEFAULT_PORT = 26379


@dataclass(frozen=True, slots=True)
class SentinelUrl:
    """The sentinels to ask for the master, and the master's name.

    Attributes:
        sentinels: host and port of each.
        service: the name that the sentinels have for the master and its replicas.
        db: database number.
        user, password: of the sentinels; that of the data servers is `broker.password_file`.
    """

    sentinels: tuple[tuple[str, int], ...]
    service: str
    db: int = 0
    user: str | None = None
    password: str | None = None

    @classmethod
    def parse(cls, url: str) -> SentinelUrl:
        """Read an address that begins with `SCHEME`; port and database may be left out.

        Raises:
            ValueError: it is not valid; the text says why.
        """
        authority, _, path = url.removeprefix(SCHEME).partition("/")
        if "?" in url:
            raise ValueError("options (behind a ?) are not supported")
        login, _, hosts = authority.rpartition("@")
        user, _, password = login.partition(":")
        service, _, db = path.partition("/")
        if not service:
            raise ValueError("it names no SERVICE, the sentinels' name for the master")
        if not (db or "0").isdecimal():
            raise ValueError(f"DB {db!r} is no number")
        return cls(
            tuple(_host_and_port(host) for host in hosts.split(",")),
            unquote(service),
            int(db or 0),
            unquote(user) or None,
            unquote(password) or None,
        )


def _host_and_port(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):  # no port, or the last colon is one of an IPv6 address
        host, port = text, str(DEFAULT_PORT)
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{text!r} is no HOST:PORT")
    return host, int(port)
