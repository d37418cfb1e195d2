"""One connection to the learner's weight server: waits for a new snapshot and pulls it, chunk by chunk."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import zmq

from common.config import WeightsConfig
from common.curve import key_pair, public_key
from common.errors import UserError
from common.messages import InvalidMessage
from common.weights import Chunk, Fetch, Gone, Manifest, Poll, Refused, checksum, unpack_reply
from generator.shared_weights import MemoryPool, SharedWeights

TICK = 0.1  # seconds after which a wait looks whether it is still wanted
POLL_AGAIN = 2.0  # seconds after which a poll is repeated: a learner that restarted does not know of it


class ConnectionLost(Exception):
    """The server is silent or elsewhere; connect anew."""


class Stopped(Exception):
    """The caller no longer wants the weights."""


@dataclass
class TransferStats:
    """Counts over all transfers of a client."""

    transfers: int = 0
    transferred_bytes: int = 0
    seconds: float = 0.0
    corrupt_chunks: int = 0
    restarts: int = 0
    reconnects: int = 0


class Connection:
    """A DEALER socket to one address.

    Args:
        endpoint: as `WeightServer.endpoint` gives it: `address`, and `server_key` if CURVE is on.
        config: `credit` chunks are asked for ahead; keys are read from `curve_dir`.
        timeout: seconds of silence in a transfer after which the connection counts as lost.
        stats: added to.
        pool: where the weights are put.
        stopped: asked regularly; once it is true, waiting ends with `Stopped`.

    Raises:
        UserError: keys are missing here, or are not the server's.
    """

    def __init__(
        self,
        endpoint: Mapping[str, str],
        config: WeightsConfig,
        timeout: float,
        stopped: Callable[[], bool],
        stats: TransferStats,
        pool: MemoryPool,
    ) -> None:
        self.address = endpoint["address"]
        self._credit = config.credit
        self._timeout = timeout
        self._stopped = stopped
        self._stats = stats
        self._pool = pool
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._socket = context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.immediate = True  # nothing is queued for a server that is not there
        self._socket.ipv6 = "[" in self.address
        try:
            self._use_keys(endpoint.get("server_key"), config.curve_dir)
            self._socket.connect(self.address)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give the socket back."""
        self._socket.close()

    def wait_for_other(self, have: str, still_there: Callable[[], bool]) -> Manifest:
        """Wait until the server has a snapshot other than `have`.

        Raises:
            ConnectionLost: `still_there` says that the server is elsewhere now.
            Stopped: see the class.
        """
        asked = 0.0
        while True:
            if time.monotonic() - asked > POLL_AGAIN:
                if not still_there():
                    raise ConnectionLost(f"{self.address} is no longer the learner's address")
                if self._send(Poll(have=have).pack()):
                    asked = time.monotonic()
            reply, _ = self._receive()
            if isinstance(reply, Refused):
                raise UserError(f"the learner at {self.address} speaks another version of the protocol: {reply.reason}")
            if isinstance(reply, Manifest) and reply.snapshot != have:
                return reply

    def pull(self, manifest: Manifest) -> SharedWeights | None:
        """Fetch a snapshot into shared memory; None if the server has dropped it meanwhile.

        A chunk whose checksum is wrong is asked for again.

        Raises:
            ConnectionLost: nothing came for `timeout` seconds, or a chunk is wrong every time.
            Stopped: see the class.
        """
        began = time.monotonic()
        weights = SharedWeights(manifest, self._pool.take(manifest.total_bytes), self._pool.give_back)
        try:
            complete = self._fetch_all(manifest, weights)
        except BaseException:
            weights.close()
            raise
        if not complete:
            self._stats.restarts += 1
            weights.close()
            return None
        self._stats.transfers += 1
        self._stats.transferred_bytes += manifest.total_bytes
        weights.seconds = time.monotonic() - began
        self._stats.seconds += weights.seconds
        return weights

    def _fetch_all(self, manifest: Manifest, weights: SharedWeights) -> bool:
        chunks = len(manifest.checksums)
        under_way: set[int] = set()
        asked = 0
        wrong: dict[int, int] = {}
        heard = nudged = time.monotonic()
        while asked < chunks or under_way:
            while asked < chunks and len(under_way) < self._credit:
                self._ask(manifest, asked)
                under_way.add(asked)
                asked += 1
            reply, data = self._receive()
            now = time.monotonic()
            if isinstance(reply, Gone) and reply.snapshot == manifest.snapshot:
                return False
            if isinstance(reply, Chunk) and reply.snapshot == manifest.snapshot and reply.chunk in under_way:
                heard = now
                if self._accept(manifest, reply.chunk, data, weights):
                    under_way.discard(reply.chunk)
                else:
                    wrong[reply.chunk] = wrong.get(reply.chunk, 0) + 1
                    if wrong[reply.chunk] == 5:
                        raise ConnectionLost(f"chunk {reply.chunk} of {self.address} has a wrong checksum every time")
                    self._ask(manifest, reply.chunk)
            elif now - heard > self._timeout:
                raise ConnectionLost(f"{self.address} has been silent for {self._timeout} s")
            elif now - max(heard, nudged) > self._timeout / 4:
                nudged = now
                for chunk in under_way:
                    self._ask(manifest, chunk)
        return True

    def _accept(self, manifest: Manifest, chunk: int, data: memoryview, weights: SharedWeights) -> bool:
        start, end = manifest.chunk_range(chunk)
        if len(data) != end - start or checksum(data) != manifest.checksums[chunk]:
            self._stats.corrupt_chunks += 1
            return False
        weights.write(start, data)
        return True

    def _ask(self, manifest: Manifest, chunk: int) -> None:
        if not self._send(Fetch(snapshot=manifest.snapshot, chunk=chunk).pack()):
            raise ConnectionLost(f"{self.address} is not there")

    def _send(self, body: bytes) -> bool:
        """False if there is no connection now."""
        try:
            self._socket.send(body, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _receive(self) -> tuple[Manifest | Chunk | Gone | Refused | None, memoryview]:
        """The next reply and its data; (None, empty) after a tick, or for what is not a reply."""
        if self._stopped():
            raise Stopped
        if not self._socket.poll(int(TICK * 1000)):
            return None, memoryview(b"")
        frames = self._socket.recv_multipart(copy=False)
        try:
            return unpack_reply(frames[0].buffer), frames[1].buffer if len(frames) > 1 else memoryview(b"")
        except InvalidMessage:
            return None, memoryview(b"")

    def _use_keys(self, server_key: str | None, folder: str | None) -> None:
        if folder is None:
            if server_key:
                raise UserError(
                    f"the weights at {self.address} are protected by keys: set learner.weights.curve_dir to the "
                    "folder with client.key_secret and server.key"
                )
            return
        trusted = public_key(folder, "server")
        if server_key and server_key.encode() != trusted:
            raise UserError(
                f"the learner at {self.address} has another key than {folder}/server.key: use the same set of keys "
                "(learner.weights.curve_dir) for the learner and all generators"
            )
        self._socket.curve_serverkey = trusted
        self._socket.curve_publickey, self._socket.curve_secretkey = key_pair(folder, "client")
