"""Serves the newest weights over ZeroMQ: generators come, go and pull when they like."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
import zmq
from zmq.auth.thread import ThreadAuthenticator

from common.config import WeightsConfig
from common.curve import key_pair, public_key
from common.errors import UserError
from common.log import get_logger
from common.messages import InvalidMessage
from common.weights import Chunk, Fetch, Gone, Poll, Refused, unpack_request
from learner.snapshot import Snapshot, take_snapshot

READER_TIMEOUT = 30.0  # seconds without a request after which a transfer counts as given up
REQUESTS_A_ROUND = 64  # so that a flood of requests does not keep a new version waiting
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class WeightServer:
    """One ROUTER socket in a background thread.

    A transfer that began may end: at most one snapshot older than the newest is kept, as long as
    somebody reads it. Chunks are sent from the snapshot's own memory. What cannot be understood is
    refused; nothing a client sends stops the server.

    Raises:
        UserError: the address is in use or cannot be bound, it is open to the network without keys,
            or the keys cannot be read.
    """

    def __init__(self, config: WeightsConfig, *, log: Any = None) -> None:
        self._log = log or get_logger()
        self._chunk_bytes = config.chunk_mib << 20
        self._incoming: deque[Snapshot] = deque(maxlen=1)  # handed from the publisher's thread to ours
        self._spare: deque[torch.Tensor] = deque(maxlen=1)  # memory of a dropped snapshot, handed back
        self._newest: Snapshot | None = None
        self._older: Snapshot | None = None
        self._waiting: dict[bytes, str] = {}
        self._readers: dict[bytes, tuple[str, float]] = {}
        self._under_way: dict[str, deque[zmq.MessageTracker]] = {}
        self._closing = False
        self._wake_in, self._wake_out = os.pipe()

        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        # A generator has at most `credit` chunks under way; whoever asks for more is not answered.
        self._socket.sndhwm = config.credit + 2
        self._socket.router_mandatory = True
        self._socket.ipv6 = "[" in config.bind
        self._authenticator: ThreadAuthenticator | None = None
        self._server_key = ""
        try:
            if config.curve_dir is not None:
                self._require_keys(config.curve_dir)
            self.address = self._bind(config)
        except BaseException:
            self._free()
            raise
        self._thread = threading.Thread(target=self._serve, name="weight-server", daemon=True)
        self._thread.start()

    def publish(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | str) -> None:
        """Copy the weights and serve them from now on; returns after the copy.

        Args:
            version: weights after this many learner steps.
            tensors: (name, tensor) as `transformers` names them, each tied tensor once.
            dtype: what floating-point tensors are sent as.
        """
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        spare = self._spare.popleft() if self._spare else None
        self._incoming.append(take_snapshot(version, tensors, dtype, self._chunk_bytes, spare))
        os.write(self._wake_out, b"p")

    def endpoint(self) -> dict[str, str]:
        """What generators need to connect: the address, and the public key if there is one."""
        return {"address": self.address} | ({"server_key": self._server_key} if self._server_key else {})

    def close(self) -> None:
        """Stop serving."""
        self._closing = True
        os.write(self._wake_out, b"c")
        self._thread.join()
        self._free()

    def _require_keys(self, folder: str) -> None:
        public, secret = key_pair(folder, "server")
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback("*", _OnlyKey(public_key(folder, "client")))
        self._socket.curve_server = True
        self._socket.curve_publickey, self._socket.curve_secretkey = public, secret
        self._server_key = public.decode()

    def _bind(self, config: WeightsConfig) -> str:
        host = _host(config.bind)
        if config.curve_dir is None and host not in LOOPBACK:
            raise UserError(
                f"learner.weights.bind = {config.bind!r} is open to the network without keys: set "
                "learner.weights.curve_dir (`spo keys DIR` makes them), or bind to 127.0.0.1"
            )
        try:
            self._socket.bind(config.bind)
        except zmq.ZMQError as error:
            fix = (
                "stop the process that uses it, or set learner.weights.bind to another port (* takes any free one)"
                if error.errno == zmq.EADDRINUSE
                else "set it to an address of this machine, as tcp://host:port"
            )
            raise UserError(f"cannot serve weights on learner.weights.bind = {config.bind!r}: {error}; {fix}") from None
        bound = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        port = bound.rpartition(":")[2]
        if config.advertise:
            given, star, _ = config.advertise.partition(":*")
            return f"{given}:{port}" if star else given
        if _host(bound) in ("0.0.0.0", "::", "*"):
            return f"tcp://{socket.gethostname()}:{port}"
        return bound

    def _free(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
        self._socket.close()
        self._context.term()
        os.close(self._wake_in)
        os.close(self._wake_out)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_in, zmq.POLLIN)
        while not self._closing:
            ready = dict(poller.poll(1000 if self._older else None))
            if self._wake_in in ready:
                os.read(self._wake_in, 64)
                self._adopt()
            if self._socket in ready:
                self._answer_all()
            self._forget_older()

    def _answer_all(self) -> None:
        for _ in range(REQUESTS_A_ROUND):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            client, body = frames[0], frames[1:]
            try:
                if len(body) != 1:
                    raise InvalidMessage(f"weight request: {len(body)} frames instead of one")
                self._answer(client, unpack_request(body[0]))
            except InvalidMessage as error:
                self._log.warning("weight request refused", reason=str(error))
                self._send(client, Refused(reason=str(error)).pack())

    def _answer(self, client: bytes, request: Poll | Fetch) -> None:
        if isinstance(request, Poll):
            self._readers.pop(client, None)
            self._waiting[client] = request.have
            self._offer(client)
            return
        snapshot = self._find(request.snapshot)
        if snapshot is None:
            self._readers.pop(client, None)
            self._send(client, Gone(snapshot=request.snapshot).pack())
            return
        if request.chunk >= len(snapshot.manifest.checksums):
            raise InvalidMessage(f"weight request: chunk {request.chunk} of {len(snapshot.manifest.checksums)}")
        self._readers[client] = (request.snapshot, time.monotonic())
        header = Chunk(snapshot=request.snapshot, chunk=request.chunk)
        tracker = self._send(client, header.pack(), snapshot.chunk(request.chunk))
        if tracker is not None:
            under_way = self._under_way.setdefault(request.snapshot, deque())
            under_way.append(tracker)
            while under_way and under_way[0].done:
                under_way.popleft()

    def _offer(self, client: bytes) -> None:
        """Answer a waiting poll, if there is something the client has not."""
        if self._newest is None or self._waiting[client] == self._newest.manifest.snapshot:
            return
        del self._waiting[client]
        self._readers[client] = (self._newest.manifest.snapshot, time.monotonic())
        self._send(client, self._newest.packed_manifest)

    def _adopt(self) -> None:
        """Make the published snapshot the newest; the one before stays while it is read."""
        if not self._incoming:
            return
        self._forget_older()
        # A reader of the older one is closer to its end: it goes first, or slow readers never finish.
        if self._older is None:
            self._older = self._newest
        elif self._newest is not None:
            self._recycle(self._newest)
        self._newest = self._incoming.popleft()
        self._forget_older()
        for client in list(self._waiting):
            self._offer(client)

    def _find(self, name: str) -> Snapshot | None:
        for snapshot in (self._newest, self._older):
            if snapshot is not None and snapshot.manifest.snapshot == name:
                return snapshot
        return None

    def _forget_older(self) -> None:
        now = time.monotonic()
        self._readers = {c: (s, at) for c, (s, at) in self._readers.items() if now - at < READER_TIMEOUT}
        if self._older and all(s != self._older.manifest.snapshot for s, _ in self._readers.values()):
            self._recycle(self._older)
            self._older = None

    def _recycle(self, snapshot: Snapshot) -> None:
        """Keep a dropped snapshot's memory for the next, unless ZeroMQ still reads from it."""
        if all(tracker.done for tracker in self._under_way.pop(snapshot.manifest.snapshot, ())):
            self._spare.append(snapshot.buffer)

    def _send(self, client: bytes, *frames: bytes | memoryview) -> zmq.MessageTracker | None:
        """Answer, or drop the answer if the client left or takes nothing: it will ask again."""
        try:
            return self._socket.send_multipart([client, *frames], zmq.NOBLOCK, copy=False, track=True)
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                self._waiting.pop(client, None)
                self._readers.pop(client, None)
            elif error.errno != zmq.EAGAIN:
                self._log.warning("weights not sent", reason=str(error))
            return None


class _OnlyKey:
    """Lets one public key in."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def callback(self, domain: str, key: bytes) -> bool:
        """What `ThreadAuthenticator` asks for each connection."""
        return key == self._key


def _host(address: str) -> str:
    """Host of tcp://host:port, without brackets."""
    return address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
