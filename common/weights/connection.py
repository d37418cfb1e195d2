"""The client's side of the protocol: one connection to a learner or relay, its offers, and the chunks of a snapshot."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import zmq
from zmq.utils.monitor import recv_monitor_message

from common.config import WeightsConfig
from common.curve import key_pair, public_key
from common.errors import UserError
from common.messages import InvalidMessage
from common.unpack import MAX_BYTES
from common.weights.delta import THREADS, WrongDelta, decode, item_bytes
from common.weights.listener import HANDSHAKE_SECONDS, USER
from common.weights.memory import Transfer, TransferStats
from common.weights.wire import (
    CHUNK_BYTES,
    CREDIT,
    Chunk,
    Fetch,
    Gone,
    Hello,
    Manifest,
    Poll,
    Refused,
    Reply,
    Request,
    Welcome,
    checksum,
    unpack_reply,
)

TICK = 0.1  # seconds after which a wait checks whether it should stop
ZAP_REFUSED = 400  # status of a handshake whose key the server does not accept
REFUSALS = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_DISCONNECTED
BOX_BYTES = 1024  # more than CURVE adds to a frame
HELLO_AFTER = 1.0  # seconds of silence in a transfer after which we check whether the server is still connected
POLL_AGAIN = 2.0  # seconds after which a poll is repeated, because a restarted server has forgotten it
WRONG_MOST = 5  # how often one chunk may arrive with a wrong checksum

Arrived = Callable[[int, memoryview | None], None]  # a chunk, and its delta if it was sent as one


class ConnectionLost(Exception):
    """The server is silent or gone; connect again."""


class Stopped(Exception):
    """The caller no longer wants the weights."""


@dataclass(frozen=True)
class WeightSource:
    """A server of weights."""

    address: str
    server_key: str = ""  # its public key; empty if unknown or none
    relay: str = ""  # a relay's name; empty for the learner itself
    configured: bool = False  # whether the address is from the user's configuration
    password: str = ""  # required if there is no key; empty if unknown or none


@dataclass
class _Chunks:
    """A transfer's chunks: to be requested, requested, and those whose deltas threads are unpacking."""

    transfer: Transfer
    stats: TransferStats
    arrived: Arrived
    ahead: deque[int]
    deltas: bool
    width: int  # see `item_bytes`
    asked: set[int] = field(default_factory=set)
    unpacking: deque[tuple[int, memoryview, Future[memoryview | None]]] = field(default_factory=deque)
    whole: set[int] = field(default_factory=set)  # requested in full, because the previous reply was wrong
    wrong: Counter[int] = field(default_factory=Counter)


class Connection:
    """A DEALER socket to one server.

    Args:
        config: the run's `learner.weights`; `curve_dir` is used.
        timeout: seconds of silence after which `ConnectionLost` is raised.
        deltas: whether to tell the server that deltas are worth making.
        stopped: asked regularly; once it is true, waiting ends with `Stopped`.

    Attributes:
        heard: monotonic time [s] of the server's last message; before the first one, of the start of the connection.
        path: ids of the relays from the server up to the learner, the server first; None until it has answered.
        handover, token: see `Welcome`.

    Raises:
        UserError: keys are missing here, or are not the server's.
    """

    def __init__(
        self,
        source: WeightSource,
        config: WeightsConfig,
        timeout: float,
        stopped: Callable[[], bool],
        *,
        deltas: bool = False,
    ) -> None:
        self.source, self.deltas = source, deltas
        self.heard = self._greeted = time.monotonic()
        self.path: list[str] | None = None
        self.handover = self.token = ""
        self._curve_dir, self._timeout, self._stopped = config.curve_dir, timeout, stopped
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._socket = context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.immediate = True  # nothing is queued for a server that is not there
        # An unauthenticated server at the address may send at most this much.
        self._socket.maxmsgsize = max(MAX_BYTES, CHUNK_BYTES) + BOX_BYTES
        self._socket.handshake_ivl = round(HANDSHAKE_SECONDS * 1000)
        self._socket.ipv6 = "[" in source.address
        self._handshakes: zmq.Socket[bytes] = self._socket.get_monitor_socket(REFUSALS)
        try:
            self._use_keys(config.curve_dir)
            self._socket.connect(source.address)
        except zmq.ZMQError as error:
            self.close()
            allowed = "allowed: tcp://host:port"
            raise UserError(f"cannot pull weights from {source.address!r}: {error}; {allowed}") from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._socket.disable_monitor()
        self._socket.close()

    def wait_for(self, have: str, wants: Callable[[Manifest], bool], leave: Callable[[], bool]) -> Manifest | None:
        """Wait until the server offers a snapshot that the caller wants.

        Args:
            have: the snapshot that this client already has; empty if it has none.
            wants: called with each offer; a declined offer is made again some seconds later.
            leave: called at once and then every `POLL_AGAIN` seconds; once it is true, None is returned.

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
                if self._send(Hello()) and self._send(Poll(have=have, deltas=self.deltas)):
                    asked = now
                elif self.path is not None:
                    raise ConnectionLost(f"{self.source.address} is no longer there")
            reply, _ = self._receive()
            if isinstance(reply, Refused):
                raise UserError(
                    f"the server of weights at {self.source.address} speaks another version of the protocol: "
                    f"{reply.reason}"
                )
            if isinstance(reply, Welcome):
                self.path, self.handover, self.token = reply.path, reply.handover, reply.token
            if isinstance(reply, Manifest) and wants(reply):
                return reply

    def check(self) -> None:
        """Call this regularly while waiting for the server's answer on another socket.

        Raises:
            ConnectionLost: the server is no longer there, or silent.
            Stopped: see the class.
        """
        self._greet_if_silent()
        self._receive(0)
        if time.monotonic() - self.heard > self._timeout:
            raise ConnectionLost(f"{self.source.address} has been silent for {self._timeout:g} s")

    def _greet_if_silent(self) -> None:
        """Greet the server after some silence; raises `ConnectionLost` if it is no longer there."""
        now = time.monotonic()
        if now - max(self.heard, self._greeted) > HELLO_AFTER:
            self._greeted = now
            if not self._send(Hello()):
                raise ConnectionLost(f"{self.source.address} is no longer there")

    def fetch(self, transfer: Transfer, stats: TransferStats, arrived: Arrived) -> bool:
        """Write the missing chunks to the transfer's file; False if the server has dropped the snapshot meanwhile.

        Deltas are unpacked in threads. A chunk is written once its checksum is right; if it is wrong, the chunk is
        requested again in full.

        Args:
            arrived: called for each chunk that was written.

        Raises:
            ConnectionLost: nothing came for `timeout` seconds, or a chunk was wrong `WRONG_MOST` times.
            Stopped: see the class.
        """
        name = transfer.manifest.snapshot
        has_base = self.deltas and transfer.base is not None and transfer.manifest.base != ""
        ahead, width = deque(sorted(transfer.missing)), item_bytes(transfer.manifest)
        chunks = _Chunks(transfer, stats, arrived, ahead, has_base, width)
        with ThreadPoolExecutor(THREADS, "deltas") as pool:
            heard = asked = time.monotonic()
            while transfer.missing:
                while ahead and len(chunks.asked) + len(chunks.unpacking) < CREDIT:
                    self._ask(chunks, ahead.popleft())
                # Place deltas that are unpacked; wait for one only if no reply is outstanding.
                if chunks.unpacking and (not chunks.asked or chunks.unpacking[0][2].done()):
                    chunk, delta, unpacked = chunks.unpacking.popleft()
                    self._place(chunks, chunk, unpacked.result(), delta)
                    continue
                reply, data = self._receive()
                now = time.monotonic()
                if isinstance(reply, Gone) and reply.snapshot == name:
                    return False
                if isinstance(reply, Chunk) and reply.snapshot == name and reply.chunk in chunks.asked:
                    heard = now
                    chunks.asked.discard(reply.chunk)
                    stats.received_bytes += len(data)
                    if reply.delta and chunks.deltas and reply.chunk not in chunks.whole:
                        chunks.unpacking.append((reply.chunk, data, pool.submit(_unpack, chunks, reply.chunk, data)))
                    else:
                        right = not reply.delta and _is_right(transfer.manifest, reply.chunk, data)
                        self._place(chunks, reply.chunk, data if right else None, None)
                elif now - heard > self._timeout:
                    raise ConnectionLost(f"{self.source.address} has sent no weights for {self._timeout:g} s")
                elif now - max(heard, asked) > self._timeout / 4:
                    asked = now
                    # The server drops answers that it cannot send.
                    for chunk in list(chunks.asked):
                        self._ask(chunks, chunk)
                else:
                    self._greet_if_silent()
        return True

    def _ask(self, chunks: _Chunks, chunk: int) -> None:
        delta = chunks.deltas and chunk not in chunks.whole
        if not self._send(Fetch(snapshot=chunks.transfer.manifest.snapshot, chunk=chunk, delta=delta)):
            raise ConnectionLost(f"{self.source.address} is not there")
        chunks.asked.add(chunk)

    def _place(self, chunks: _Chunks, chunk: int, data: memoryview | None, delta: memoryview | None) -> None:
        """Write a chunk to the file, or request it again if what arrived was wrong (`data` is None)."""
        transfer = chunks.transfer
        if data is not None:
            transfer.file.write(transfer.manifest.chunk_range(chunk)[0], data)
            transfer.missing.discard(chunk)
            chunks.stats.delta_chunks += delta is not None
            chunks.arrived(chunk, delta)
            return
        chunks.stats.corrupt_chunks += 1
        chunks.whole.add(chunk)
        chunks.wrong[chunk] += 1
        if chunks.wrong[chunk] == WRONG_MOST:
            raise ConnectionLost(f"chunk {chunk} of {self.source.address} has a wrong checksum every time")
        self._ask(chunks, chunk)

    def _send(self, request: Request) -> bool:
        """Send a request; False if there is no connection now."""
        try:
            self._socket.send(request.pack(), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _receive(self, seconds: float = TICK) -> tuple[Reply | None, memoryview]:
        """The next reply and its data; (None, empty) after some time, or if it is not a reply. Raises `Stopped`."""
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

    def _check_handshakes(self) -> None:
        """Raise if a handshake failed. ZeroMQ reports this only on the monitor socket, and may not try again."""
        while self._handshakes.poll(0):
            event = recv_monitor_message(self._handshakes)
            if event["event"] == zmq.EVENT_DISCONNECTED and self.path is not None:
                continue  # ZeroMQ connects again, or `_send` finds that it does not
            refused = event["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH and event["value"] == ZAP_REFUSED
            if refused and self._curve_dir is not None:
                key = f"{self._curve_dir}/client.key_secret"
                raise UserError(
                    f"the server of weights at {self.source.address} refuses {key}: "
                    "use the same set of keys (learner.weights.curve_dir) for the learner, relays and all generators"
                )
            # The server may just be starting or stopping. `Follower` checks the user's own address later.
            if not self.source.configured:
                raise ConnectionLost(f"{self.source.address} has refused the connection")

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


def _is_right(manifest: Manifest, chunk: int, data: memoryview) -> bool:
    start, end = manifest.chunk_range(chunk)
    return len(data) == end - start and checksum(data) == manifest.checksums[chunk]


def _unpack(chunks: _Chunks, chunk: int, delta: memoryview) -> memoryview | None:
    """The base with a delta applied; None if its checksum is not the manifest's."""
    manifest, base = chunks.transfer.manifest, chunks.transfer.base
    assert base is not None
    try:
        data = decode(delta, base.view(*manifest.chunk_range(chunk)), chunks.width)
    except WrongDelta:
        return None
    return data if _is_right(manifest, chunk, data) else None
