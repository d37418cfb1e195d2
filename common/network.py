"""Addresses, sockets to listen on, and requests that are tried again."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import math
import random
import re
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TypeVar
from urllib.parse import urlsplit

from common.errors import UserError, one_line

T = TypeVar("T")

MAX_REASON = 300  # characters of a server's text that reach a message
REMEDIES = {
    errno.EADDRINUSE: "; choose another --port, or 0 for any that is free",
    errno.EADDRNOTAVAIL: "; --host is not an address of this machine: 0.0.0.0 stands for all that it has",
    errno.EACCES: "; ports below 1024 belong to the administrator: choose another --port",
}

LOOPBACK = ("127.0.0.1", "localhost", "::1")
NO_PROXY = ("no_proxy", "NO_PROXY")  # clients read one of them, most prefer the first


def without_proxy_on_loopback(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables by which clients reach this machine's own servers directly, and others as the user has set.

    If only one of the variables is set, the other gets its entries too, because it would hide them otherwise.
    """
    variables = {}
    for name, other in (NO_PROXY, NO_PROXY[::-1]):
        own = [entry.strip() for entry in (environ.get(name) or environ.get(other, "")).split(",") if entry.strip()]
        # `*` stands for all hosts, for some clients only if it stands alone.
        variables[name] = "*" if "*" in own else ",".join([*own, *(host for host in LOOPBACK if host not in own)])
    return variables


def is_loopback(host: str) -> bool:
    """True if only this machine can reach a host name or address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def is_loopback_url(url: str) -> bool:
    """True if only this machine can reach the host of an address."""
    try:
        return is_loopback(urlsplit(url).hostname or "")
    except ValueError:
        return False


def is_this_machine(host: str) -> bool:
    """True if an address is one of this machine's own; a name that cannot be looked up is not."""
    if is_loopback(host):
        return True
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)
    except (OSError, UnicodeError):  # UnicodeError: not a host name, such as `node..1`
        return False
    return True


def header_host(header: str) -> str:
    """The host name or address in a `Host` header, without port and brackets."""
    name, _, port = header.rpartition(":")
    return (name if port.isdigit() else header).strip("[]").lower()


def host_of(address: str) -> str:
    """The host of `tcp://host:port`, without the brackets of IPv6."""
    return address.removeprefix("tcp://").rpartition(":")[0].strip("[]")


def is_tcp(address: str) -> bool:
    """True for `tcp://host:port` with a possible port."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return address.startswith("tcp://") and bool(host) and port.isdecimal() and 0 < int(port) < 65536


def check_bind(bind: str, curve_dir: str | None, option: str) -> None:
    """Refuse an address to serve weights on that is malformed, or open to the network without keys."""
    if not (is_tcp(bind) or (is_tcp(f"{bind[:-1]}1") and bind.endswith(":*"))):
        raise UserError(f"{option} = {bind!r} must be of the form tcp://host:port (port 1 to 65535, or * for any)")
    if curve_dir is None and not is_loopback(host_of(bind)):
        raise UserError(
            f"{option} = {bind!r} is open to the network without keys: set learner.weights.curve_dir "
            "(`spo keys DIR` makes them), or bind to 127.0.0.1"
        )


def without_password(url: str) -> str:
    """An address as it may be shown: its password is replaced by stars, also if the address is malformed."""
    return re.sub(r"([?&](?:ssl_)?password=)[^&]*", r"\1***", re.sub(r"(://[^:@/]*):.*@", r"\1:***@", url))


def bound(host: str, port: int) -> socket.socket:
    """A socket that is bound to an address, and does not listen yet; raises `UserError` about --host and --port."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except (OSError, UnicodeError) as error:
        raise _refused(host, port, "bound", error) from None
    return listener


def listen(listener: socket.socket, host: str, port: int, backlog: int) -> None:
    """Have the kernel queue connections; raises `UserError` if another process has begun to listen there since."""
    try:
        listener.listen(backlog)
    except OSError as error:
        raise _refused(host, port, "listened on", error) from None


def _refused(host: str, port: int, verb: str, error: OSError | UnicodeError) -> UserError:
    code, words = (error.errno, error.strerror) if isinstance(error, OSError) else (None, None)
    return UserError(f"--host {host} --port {port} cannot be {verb}: {words or error}{REMEDIES.get(code or 0, '')}")


class RetryableError(Exception):
    """This attempt failed, and the next may succeed; `after` is the pause that the server asks for, in seconds."""

    def __init__(self, reason: str, after: float = 0.0) -> None:
        super().__init__(reason)
        self.after = after


class RetriesExhausted(Exception):
    """All attempts failed; the text says how many there were and how the last one failed."""


@dataclass(frozen=True)
class Retries:
    """How often to try, and how long to wait in between."""

    attempts: int
    first: float  # pause in seconds; it doubles up to the longest, each shortened at random by up to half
    longest: float
    max_retry_after: float = math.inf  # longest pause in seconds that a server may ask for
    clock: Callable[[], float] = time.monotonic  # in seconds; replaced in tests, as `sleep` is
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep

    async def __call__(self, attempt: Callable[[], Awaitable[T]], seconds: float | None = None) -> T:
        """The result of the first attempt that does not raise `RetryableError` or `TimeoutError`.

        Args:
            seconds: for all attempts and the pauses between them; None if there is no limit.

        Raises:
            RetriesExhausted: all attempts failed.
            Exception: any other exception of an attempt.
        """
        deadline = math.inf if seconds is None else self.clock() + seconds
        count = 0
        while True:
            count += 1
            try:
                async with asyncio.timeout(None if seconds is None else deadline - self.clock()):
                    return await attempt()
            except TimeoutError:
                reason, after = "no answer in time", 0.0
            except RetryableError as error:
                reason, after = str(error), min(error.after, self.max_retry_after)
            pause = max(after, min(self.longest, self.first * 2 ** (count - 1)) * random.uniform(0.5, 1.0))
            if count >= self.attempts or self.clock() + pause >= deadline:
                raise RetriesExhausted(f"no result in {count} attempts; last: {reason}")
            await self.sleep(pause)


async def read_at_most(chunks: AsyncIterator[bytes], limit: int) -> bytes:
    content = bytearray()
    async for chunk in chunks:
        content += chunk[: limit - len(content)]
        if len(content) >= limit:
            break
    return bytes(content)


def retry_after(value: str) -> float:
    """Seconds of a Retry-After header: a number or a date; 0 if it is neither."""
    with contextlib.suppress(ValueError, OverflowError):
        return max(0.0, float(int(value)))
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    return 0.0


def excerpt(text: str | bytes) -> str:
    """The beginning of a server's text as one short line."""
    head = text[: 4 * MAX_REASON]
    if isinstance(head, bytes):
        head = head.decode("utf-8", "replace")
    return one_line(head)[:MAX_REASON] or "(nothing)"
