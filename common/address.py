"""Which addresses only this machine can reach, and which may be bound without keys."""

from __future__ import annotations

import ipaddress
import socket

from common.errors import UserError


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a host name or address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def is_this_machine(host: str) -> bool:
    """Whether an address is one of this machine's own; a name that nobody knows is not."""
    if is_loopback(host):
        return True
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def host_of(address: str) -> str:
    """The host of `tcp://host:port`, without the brackets of IPv6."""
    return address.removeprefix("tcp://").rpartition(":")[0].strip("[]")


def is_tcp(address: str) -> bool:
    """Whether this is `tcp://host:port`, with a port that there is."""
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
