"""The socket weights are served on: its address, and the keys or the password that protect it."""

from __future__ import annotations

import secrets
import socket
from dataclasses import dataclass

import zmq
from zmq.auth.thread import ThreadAuthenticator

from common.curve import key_pair, public_key
from common.errors import UserError
from common.network import check_bind, host_of

USER = "spo"  # ZeroMQ's PLAIN wants a name beside the password
IO_THREADS = 4  # connections are spread over them; one sends 5 to 7 GB/s


@dataclass(frozen=True)
class BindAddress:
    """Where weights are served.

    Attributes:
        bind: `tcp://host:port`; port * takes any free one.
        advertise: what others connect to, where it is not the bound address; port * stands for the bound port.
        curve_dir: folder with the keys; without it only this machine may connect.
        option: how the user names `bind`, for messages.
    """

    bind: str
    advertise: str | None = None
    curve_dir: str | None = None
    option: str = "learner.weights.bind"


class Listener:
    """A ROUTER socket with a context of its own.

    Attributes:
        address: what others connect to.
        server_key: the public key, empty without keys.
        password: what clients must say where there are no keys, since a loopback port is open to every account of the
            machine. It is published with the address in the run's Redis, and so known to the run's processes alone.

    Raises:
        UserError: the address is in use or cannot be bound, it is open to the network without keys,
            or the keys cannot be read.
    """

    def __init__(self, address: BindAddress, send_limit: int) -> None:
        self._context = zmq.Context(io_threads=IO_THREADS)
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.sndhwm = send_limit
        self.socket.router_mandatory = True
        self.socket.ipv6 = "[" in address.bind
        self._authenticator: ThreadAuthenticator | None = None
        self.server_key = self.password = ""
        try:
            if address.curve_dir is not None:
                self._require_keys(address.curve_dir)
            else:
                self._require_password()
            check_bind(address.bind, address.curve_dir, address.option)
            self.address = self._bind(address)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        # Before the authenticator: a client that connects without one running would be refused.
        self.socket.close()
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()

    def _require_password(self) -> None:
        self.password = secrets.token_hex(32)
        self._start_authenticator().configure_plain(passwords={USER: self.password})
        self.socket.plain_server = True

    def _start_authenticator(self) -> ThreadAuthenticator:
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        return self._authenticator

    def _require_keys(self, folder: str) -> None:
        public, secret = key_pair(folder, "server")
        self._start_authenticator().configure_curve_callback("*", _OnlyKey(public_key(folder, "client")))
        self.socket.curve_server = True
        self.socket.curve_publickey, self.socket.curve_secretkey = public, secret
        self.server_key = public.decode()

    def _bind(self, address: BindAddress) -> str:
        _bind(self.socket, address.bind, address.option)
        bound = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        port = bound.rpartition(":")[2]
        if address.advertise:
            host, star, _ = address.advertise.partition(":*")
            return f"{host}:{port}" if star else host
        if host_of(bound) in ("0.0.0.0", "::", "*"):
            return f"tcp://{socket.gethostname()}:{port}"
        return bound


class _OnlyKey:
    """Lets one public key in."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def callback(self, domain: str, key: bytes) -> bool:
        """`ThreadAuthenticator` asks this for each connection."""
        return key == self._key


def check_address(bind: str, option: str = "learner.weights.bind") -> None:
    """Bind a socket and give it back at once; raises `UserError` where that fails."""
    context = zmq.Context()
    probe = context.socket(zmq.ROUTER)
    probe.ipv6 = "[" in bind
    try:
        _bind(probe, bind, option)
    finally:
        # The port is free again when this returns.
        context.destroy(linger=0)


def _bind(listener: zmq.Socket[bytes], bind: str, option: str) -> None:
    try:
        listener.bind(bind)
    except zmq.ZMQError as error:
        fix = (
            f"stop the process that uses it, or set {option} to another port (* takes any free one)"
            if error.errno == zmq.EADDRINUSE
            else "set it to an address of this machine, as tcp://host:port"
        )
        raise UserError(f"cannot serve weights on {option} = {bind!r}: {error}; {fix}") from None
