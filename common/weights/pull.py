"""One connection to a weight server, learner or relay: waits for a new snapshot and pulls it, chunk by chunk."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq
from zmq.utils.monitor import recv_monitor_message

from common.config import WeightsConfig
from common.curve import key_pair, public_key
from common.errors import UserError
from common.messages import InvalidMessage
from common.weights.sources import Source
from common.weights.wire import (
    Chunk,
    Fetch,
    Gone,
    Hello,
    Manifest,
    Poll,
    Refused,
    Reply,
    Welcome,
    checksum,
    unpack_reply,
)

TICK = 0.1  # seconds after which a wait looks whether it is still wanted
KNOCK = 1.0  # seconds of silence in a transfer after which we look whether the server is still connected
REFUSED = 400  # what a server's ZAP answer says of a key it does not let in
POLL_AGAIN = 2.0  # seconds after which a poll is repeated: a server that restarted does not know of it


class ConnectionLost(Exception):
    """The server is silent or elsewhere; connect anew."""


class Stopped(Exception):
    """The caller no longer wants the weights."""


@dataclass
class TransferStats:
    """Counts over all transfers of a client, and where it pulls from now."""

    transfers: int = 0
    transferred_bytes: int = 0
    seconds: float = 0.0
    corrupt_chunks: int = 0
    restarts: int = 0
    reconnects: int = 0
    source: str = ""


@dataclass
class Transfer:
    """A snapshot on its way; it may come over several connections, from several servers.

    Attributes:
        missing: chunks that have not arrived.
        seconds: spent on it so far.
    """

    manifest: Manifest
    missing: set[int] = field(init=False)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.missing = set(range(len(self.manifest.checksums)))


class Connection:
    """A DEALER socket to one address.

    Args:
        source: where to.
        config: `credit` chunks are asked for ahead; keys are read from `curve_dir`.
        timeout: seconds of silence in a transfer after which the connection counts as lost.
        stopped: asked regularly; once it is true, waiting ends with `Stopped`.
        stats: added to.

    Attributes:
        heard: when the server last said something, by the monotonic clock; at first, when we connected.
        path: ids of the relays from the server up to the learner, the server first; None until it has said.

    Raises:
        UserError: keys are missing here, or are not the server's.
    """

    def __init__(
        self,
        source: Source,
        config: WeightsConfig,
        timeout: float,
        stopped: Callable[[], bool],
        stats: TransferStats,
    ) -> None:
        self.source = source
        self.heard = time.monotonic()
        self.path: list[str] | None = None
        self._config = config
        self._credit = config.credit
        self._timeout = timeout
        self._stopped = stopped
        self._stats = stats
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._socket = context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.immediate = True  # nothing is queued for a server that is not there
        self._socket.ipv6 = "[" in source.address
        self._handshakes: zmq.Socket[bytes] | None = None
        try:
            self._use_keys(config.curve_dir)
            self._connect()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give the socket back."""
        if self._handshakes is not None:
            self._socket.disable_monitor()
        self._socket.close()

    def wait_for(self, have: str, wanted: Callable[[Manifest], bool], leave: Callable[[], bool]) -> Manifest | None:
        """Wait until the server offers a snapshot that is wanted.

        Args:
            have: the snapshot that is here already; empty: none.
            wanted: asked of each offer; what it does not want is offered again some seconds later.
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
                if self._send(Hello()) and self._send(Poll(have=have)):
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
                self.path = reply.path
            if isinstance(reply, Manifest) and wanted(reply):
                return reply

    def pull(self, transfer: Transfer, deliver: Callable[[int, memoryview], None]) -> bool:
        """Fetch the chunks that are missing; False if the server has dropped the snapshot meanwhile.

        A chunk whose checksum is wrong is asked for again.

        Args:
            transfer: what has arrived is taken from `missing`.
            deliver: takes each chunk's number and its verified bytes, in whatever order they come.

        Raises:
            ConnectionLost: nothing came for `timeout` seconds, or a chunk is wrong every time.
            Stopped: see the class.
        """
        began = time.monotonic()
        try:
            complete = self._fetch_missing(transfer, deliver)
        finally:
            transfer.seconds += time.monotonic() - began
        if complete:
            self._stats.transfers += 1
            self._stats.transferred_bytes += transfer.manifest.total_bytes
            self._stats.seconds += transfer.seconds
        else:
            self._stats.restarts += 1
        return complete

    def _fetch_missing(self, transfer: Transfer, deliver: Callable[[int, memoryview], None]) -> bool:
        name = transfer.manifest.snapshot
        ahead = deque(sorted(transfer.missing))
        under_way: set[int] = set()
        wrong: dict[int, int] = {}
        arrived = asked = knocked = time.monotonic()
        while transfer.missing:
            while ahead and len(under_way) < self._credit:
                self._ask(name, ahead[0])
                under_way.add(ahead.popleft())
            reply, data = self._receive()
            now = time.monotonic()
            if isinstance(reply, Gone) and reply.snapshot == name:
                return False
            if isinstance(reply, Chunk) and reply.snapshot == name and reply.chunk in under_way:
                arrived = now
                if self._is_right(transfer.manifest, reply.chunk, data):
                    deliver(reply.chunk, data)
                    under_way.discard(reply.chunk)
                    transfer.missing.discard(reply.chunk)
                else:
                    wrong[reply.chunk] = wrong.get(reply.chunk, 0) + 1
                    if wrong[reply.chunk] == 5:
                        raise ConnectionLost(
                            f"chunk {reply.chunk} of {self.source.address} has a wrong checksum every time"
                        )
                    self._ask(name, reply.chunk)
            elif now - arrived > self._timeout:
                raise ConnectionLost(f"{self.source.address} has sent no weights for {self._timeout:g} s")
            elif now - max(arrived, asked) > self._timeout / 4:
                asked = now
                for chunk in under_way:
                    self._ask(name, chunk)
            elif now - max(arrived, knocked) > KNOCK:
                knocked = now
                if not self._send(Hello()):
                    raise ConnectionLost(f"{self.source.address} is no longer there")
        return True

    def _is_right(self, manifest: Manifest, chunk: int, data: memoryview) -> bool:
        start, end = manifest.chunk_range(chunk)
        if len(data) == end - start and checksum(data) == manifest.checksums[chunk]:
            return True
        self._stats.corrupt_chunks += 1
        return False

    def _ask(self, snapshot: str, chunk: int) -> None:
        if not self._send(Fetch(snapshot=snapshot, chunk=chunk)):
            raise ConnectionLost(f"{self.source.address} is not there")

    def _send(self, request: Poll | Fetch | Hello) -> bool:
        """False if there is no connection now."""
        try:
            self._socket.send(request.pack(), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _receive(self) -> tuple[Reply | None, memoryview]:
        """The next reply and its data; (None, empty) after a tick, or for what is not a reply."""
        if self._stopped():
            raise Stopped
        if not self._socket.poll(int(TICK * 1000)):
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
        """A server that refuses a key says so to ZeroMQ alone; we would wait for ever."""
        while self._handshakes is not None and self._handshakes.poll(0):
            if recv_monitor_message(self._handshakes)["value"] == REFUSED:
                key = f"{self._config.curve_dir}/client.key_secret"
                raise UserError(
                    f"the server of weights at {self.source.address} refuses {key}: "
                    "use the same set of keys (learner.weights.curve_dir) for the learner, relays and all generators"
                )

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
            return
        trusted = public_key(folder, "server")
        if server_key and server_key.encode() != trusted:
            raise UserError(
                f"the server of weights at {address} has another key than {folder}/server.key: use the same set of "
                "keys (learner.weights.curve_dir) for the learner, relays and all generators"
            )
        self._socket.curve_serverkey = trusted
        self._socket.curve_publickey, self._socket.curve_secretkey = key_pair(folder, "client")
        self._handshakes = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
