"""One connection to a weight server, learner or relay: requests, replies, and the wait for a new snapshot."""

from __future__ import annotations

import time
from collections.abc import Callable

import zmq
from zmq.utils.monitor import recv_monitor_message

from common.curve import key_pair, public_key
from common.errors import UserError
from common.messages import InvalidMessage
from common.weights.listener import USER
from common.weights.sources import Source
from common.weights.wire import Hello, Manifest, Poll, Refused, Reply, Request, Welcome, unpack_reply

TICK = 0.1  # seconds after which a wait checks whether it should stop
ZAP_REFUSED = 400  # status of a handshake whose key the server does not accept
REFUSALS = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
HELLO_AFTER = 1.0  # seconds of silence in a transfer after which we check whether the server is still connected
POLL_AGAIN = 2.0  # seconds after which a poll is repeated: a server that restarted does not know of it


class ConnectionLost(Exception):
    """The server is silent or elsewhere; connect anew."""


class Stopped(Exception):
    """The caller no longer wants the weights."""


class Connection:
    """A DEALER socket to one address.

    Args:
        source: where to.
        curve_dir: folder with the keys, if there are any.
        timeout: seconds of silence after which whoever waits for a reply should raise `ConnectionLost`.
        deltas: the server is to know that deltas are worth making.
        stopped: asked regularly; once it is true, waiting ends with `Stopped`.

    Attributes:
        timeout, deltas: see above.
        heard: when the server last said something, by the monotonic clock; at first, when we connected.
        path: ids of the relays from the server up to the learner, the server first; None until it has said.
        handover, token: see `Welcome`.

    Raises:
        UserError: keys are missing here, or are not the server's.
    """

    def __init__(
        self,
        source: Source,
        curve_dir: str | None,
        timeout: float,
        stopped: Callable[[], bool],
        *,
        deltas: bool = False,
    ) -> None:
        self.source = source
        self.timeout = timeout
        self.deltas = deltas
        self.heard = time.monotonic()
        self.path: list[str] | None = None
        self.handover = self.token = ""
        self._greeted = self.heard
        self._curve_dir = curve_dir
        self._stopped = stopped
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._socket = context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.immediate = True  # nothing is queued for a server that is not there
        self._socket.ipv6 = "[" in source.address
        self._handshakes: zmq.Socket[bytes] = self._socket.get_monitor_socket(REFUSALS)
        try:
            self._use_keys(curve_dir)
            self._connect()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give the socket back."""
        self._socket.disable_monitor()
        self._socket.close()

    def send(self, request: Request) -> bool:
        """Send a request; False if there is no connection now."""
        try:
            self._socket.send(request.pack(), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self, seconds: float = TICK) -> tuple[Reply | None, memoryview]:
        """The next reply and its data; (None, empty) after some time, or for what is not a reply. Raises `Stopped`."""
        if self._stopped():
            raise Stopped
        if not self._socket.poll(int(seconds * 1000)):
            self._check_handshakes()
            return None, memoryview(b"")
        frames = self._socket.recv_multipart(copy=False)
        try:
            reply = unpack_reply(frames[0].buffer)
        except InvalidMessage:
            return None, memoryview(b"")
        self.heard = time.monotonic()
        return reply, frames[1].buffer if len(frames) > 1 else memoryview(b"")

    def check(self) -> None:
        """To be called regularly while the server's answer is to come another way.

        Raises:
            ConnectionLost: it is no longer there, or silent.
            Stopped: see the class.
        """
        now = time.monotonic()
        if now - max(self.heard, self._greeted) > HELLO_AFTER:
            self._greeted = now
            if not self.send(Hello()):
                raise ConnectionLost(f"{self.source.address} is no longer there")
        self.receive(0)
        if now - self.heard > self.timeout:
            raise ConnectionLost(f"{self.source.address} has been silent for {self.timeout:g} s")

    def wait_for(self, have: str, wants: Callable[[Manifest], bool], leave: Callable[[], bool]) -> Manifest | None:
        """Wait until the server offers a snapshot that the caller wants.

        Args:
            have: the snapshot that is here already; empty: none.
            wants: asked of each offer; an offer it does not want comes again some seconds later.
            leave: asked at once and then every `POLL_AGAIN` seconds; once it is true, None is returned.

        Raises:
            ConnectionLost: the server was there and no longer is.
            UserError: the server speaks another protocol.
            Stopped: see the class.
        """
        asked = looked = float("-inf")
        while True:
            now = time.monotonic()
            if now - looked > POLL_AGAIN:
                if leave():
                    return None
                looked = now
            if now - asked > POLL_AGAIN:
                if self.send(Hello()) and self.send(Poll(have=have, deltas=self.deltas)):
                    asked = now
                elif self.path is not None:
                    raise ConnectionLost(f"{self.source.address} is no longer there")
            reply, _ = self.receive()
            if isinstance(reply, Refused):
                raise UserError(
                    f"the server of weights at {self.source.address} speaks another version of the protocol: "
                    f"{reply.reason}"
                )
            if isinstance(reply, Welcome):
                self.path, self.handover, self.token = reply.path, reply.handover, reply.token
            if isinstance(reply, Manifest) and wants(reply):
                return reply

    def _check_handshakes(self) -> None:
        """A server that refuses a key or a password says so to ZeroMQ alone, which never tries again by itself."""
        while self._handshakes.poll(0):
            if recv_monitor_message(self._handshakes)["value"] == ZAP_REFUSED and self._curve_dir is not None:
                key = f"{self._curve_dir}/client.key_secret"
                raise UserError(
                    f"the server of weights at {self.source.address} refuses {key}: "
                    "use the same set of keys (learner.weights.curve_dir) for the learner, relays and all generators"
                )
            # It may be one that is just being stopped, or started. An address of the user's is looked into later.
            if not self.source.configured:
                raise ConnectionLost(f"{self.source.address} has refused the connection")

    def _connect(self) -> None:
        try:
            self._socket.connect(self.source.address)
        except zmq.ZMQError as error:
            raise UserError(
                f"cannot pull weights from {self.source.address!r}: {error}; allowed: tcp://host:port"
            ) from None

    def _use_keys(self, folder: str | None) -> None:
        address, server_key = self.source.address, self.source.server_key
        if folder is None:
            if server_key:
                raise UserError(
                    f"the weights at {address} are protected by keys: set learner.weights.curve_dir to the folder with "
                    "client.key_secret and server.key"
                )
            if self.source.password:
                self._socket.plain_username = USER.encode()
                self._socket.plain_password = self.source.password.encode()
            return
        trusted = public_key(folder, "server")
        if server_key and server_key.encode() != trusted:
            raise UserError(
                f"the server of weights at {address} has another key than {folder}/server.key: use the same set of "
                "keys (learner.weights.curve_dir) for the learner, relays and all generators"
            )
        self._socket.curve_serverkey = trusted
        self._socket.curve_publickey, self._socket.curve_secretkey = key_pair(folder, "client")
