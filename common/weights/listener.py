"""The socket weights are served on: its address, and the keys or the password that protect it."""

from __future__ import annotations

import secrets
import socket
from types import SimpleNamespace

import zmq
from zmq.auth.thread import ThreadAuthenticator

from common.config import WeightsConfig
from common.curve import key_pair, public_key
from common.errors import UserError
from common.network import check_bind, host_of
from common.weights.strangers import Strangers

USER = "spo"  # ZeroMQ's PLAIN mechanism needs a name beside the password
IO_THREADS = 4  # connections are spread over them; one sends 5 to 7 GB/s
MAX_FRAME = 4096  # bytes that a client may send at once: a request, or a step of the handshake
HANDSHAKE_SECONDS = 10.0


class Listener:
    """A ROUTER socket with a context of its own.

    Until ZeroMQ has checked a client's key or password, it stores at most one frame of `MAX_FRAME` bytes for it, for at
    most `HANDSHAKE_SECONDS`; `Strangers` bounds the number of such clients.

    Args:
        config: `bind`, `advertise` and `curve_dir` are used.
        option: the setting or option that gave `bind`, for messages.

    Attributes:
        address: what others connect to.
        strangers: the thread that reads from `socket` also waits for its `events` and calls its `turn`.
        server_key: the public key, empty without keys.
        password: required of clients if there are no keys, because every account of the machine can connect to a
            loopback port. It is published with the address in the run's Redis, so only the run's processes know it.

    Raises:
        UserError: the address is in use or cannot be bound, it is open to the network without keys,
            or the keys cannot be read.
    """

    def __init__(self, config: WeightsConfig, option: str, send_limit: int) -> None:
        self._context = zmq.Context(io_threads=IO_THREADS)
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.sndhwm = send_limit
        self.socket.maxmsgsize = MAX_FRAME
        self.socket.handshake_ivl = round(HANDSHAKE_SECONDS * 1000)
        self.socket.router_mandatory = True
        self.socket.ipv6 = "[" in config.bind
        self.strangers = Strangers(self.socket)
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self.server_key = self.password = ""
        try:
            check_bind(config.bind, config.curve_dir, option)
            if config.curve_dir is None:
                self.password = secrets.token_hex(32)
                self._authenticator.configure_plain(passwords={USER: self.password})
                self.socket.plain_server = True
            else:
                self._require_keys(config.curve_dir)
            _bind(self.socket, config.bind, option)
            self.address = self._address(config.advertise)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        # Closed before the authenticator, without which ZeroMQ would refuse a client that connects.
        self.socket.close()
        self.strangers.events.close()
        self._authenticator.stop()
        self._context.term()

    def _require_keys(self, folder: str) -> None:
        (public, secret), client = key_pair(folder, "server"), public_key(folder, "client")
        # ZeroMQ's authenticator calls this for each connection.
        only_client = SimpleNamespace(callback=lambda domain, key: key == client)
        self._authenticator.configure_curve_callback("*", only_client)
        self.socket.curve_server = True
        self.socket.curve_publickey, self.socket.curve_secretkey = public, secret
        self.server_key = public.decode()

    def _address(self, advertise: str | None) -> str:
        bound = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        port = bound.rpartition(":")[2]
        if advertise:
            host, star, _ = advertise.partition(":*")
            return f"{host}:{port}" if star else host
        if host_of(bound) in ("0.0.0.0", "::", "*"):
            return f"tcp://{socket.gethostname()}:{port}"
        return bound


def check_address(bind: str, option: str = "learner.weights.bind") -> None:
    """Bind a socket to an address and close it at once; raises `UserError` if that fails."""
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
