"""Helpers of the weight tests: random weights, and a learner that a test can corrupt, starve or restart."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import zmq

from common.config import WeightsConfig
from common.log import get_logger
from common.weights.listener import USER, BindAddress
from common.weights.memory import MemoryFile, Snapshot
from common.weights.server import SnapshotServer
from common.weights.wire import Chunk, Fetch, Gone, Hello, Manifest, Poll, Welcome, unpack_reply, unpack_request
from generator.weights.shared_weights import SharedWeights
from generator.weights.weight_client import WeightClient
from learner.weight_copy import take_snapshot
from learner.weight_server import WeightServer
from relay.relay import Relay

CHUNK = 1 << 20
PATIENCE = 120.0  # seconds until a test gives up; nothing waits that long
CONFIG = WeightsConfig(chunk_mib=1, credit=3, shared_folder="off")
ClientOf = Callable[..., WeightClient]


def random_weights(seed: int, mib: int = 5) -> dict[str, torch.Tensor]:
    """Tensors of odd sizes that do not fit chunk borders, `mib` MiB in float32."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed": (mib * 1000, 251), "norm": (7,), "scalar": (), "empty": (0, 3), "proj": (333, 33)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def read(weights: SharedWeights) -> dict[str, torch.Tensor]:
    """Tensors of a shared memory file, opened the way another process does."""
    data = np.fromfile(weights.path, np.uint8)
    manifest, tensors = weights.manifest, {}
    columns = zip(manifest.names, manifest.dtypes, manifest.shapes, manifest.offsets, strict=True)
    for name, dtype, shape, offset in columns:
        kind = getattr(torch, dtype)
        count = int(np.prod(shape))
        tensors[name] = (
            torch.frombuffer(data, dtype=kind, count=count, offset=offset).view(shape) if count else torch.empty(shape)
        )
    return tensors


def assert_same(weights: SharedWeights, expected: dict[str, torch.Tensor]) -> None:
    """All tensors arrived, bit by bit."""
    arrived = read(weights)
    assert list(arrived) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(arrived[name], tensor), name


class ScriptedServer:
    """Speaks the protocol as a test tells it to: `answer(request)` returns the frames to send, or nothing.

    Greetings it answers itself.
    """

    def __init__(self, answer: Callable[[Poll | Fetch], list[bytes]]) -> None:
        self.requests: list[Poll | Fetch] = []
        self._answer = answer
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = {"address": f"tcp://127.0.0.1:{port}"}
        self._closing = False
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self._closing:
            if self._socket.poll(20):
                client, body = self._socket.recv_multipart()
                request = unpack_request(body)
                if isinstance(request, Hello):
                    self._socket.send_multipart([client, Welcome(path=[]).pack()])
                    continue
                self.requests.append(request)
                if frames := self._answer(self.requests[-1]):
                    self._socket.send_multipart([client, *frames])

    def close(self) -> None:
        self._closing = True
        self._thread.join()
        self._socket.close()
        self._context.term()


def snapshot(version: int, seed: int, mib: int = 5, name: str | None = None) -> Snapshot:
    """Random weights as a learner serves them."""
    return take_snapshot(version, random_weights(seed, mib).items(), torch.float32, CHUNK, snapshot=name)


def arriving(manifest: Manifest) -> Snapshot:
    """A snapshot that a relay has begun to receive."""
    return Snapshot.arriving(manifest, MemoryFile(manifest.total_bytes))


def chunk_frames(source: Snapshot, request: Fetch) -> list[bytes]:
    """The right answer to a request for a chunk."""
    header = Chunk(snapshot=request.snapshot, chunk=request.chunk).pack()
    return [header, bytes(source.chunks[request.chunk])]


def gone(request: Fetch) -> list[bytes]:
    """The answer to a request for a chunk of a snapshot that is no more."""
    return [Gone(snapshot=request.snapshot).pack()]


def pulled(client: WeightClient) -> SharedWeights:
    return asyncio.run(asyncio.wait_for(client.next(), PATIENCE))


def arrives(client: WeightClient, expected: dict[str, torch.Tensor], version: int | None = None) -> SharedWeights:
    """The next weights are these, bit by bit; they are closed again."""
    with pulled(client) as weights:
        assert_same(weights, expected)
        assert version in (None, weights.version)
    return weights


def nothing_comes(client: WeightClient, seconds: float) -> bool:
    try:
        asyncio.run(asyncio.wait_for(client.next(), seconds))
    except TimeoutError:
        return True
    return False


def publish(server: WeightServer, version: int, seed: int, mib: int = 5) -> dict[str, torch.Tensor]:
    weights = random_weights(seed, mib)
    server.publish(version, weights.items(), torch.float32)
    return weights


def versions_arrive(server: WeightServer, clients: Sequence[WeightClient], versions: Iterable[int]) -> int:
    """Each of these versions is published and comes to all clients, bit by bit; how many bytes one is."""
    size = 0
    for version in versions:
        expected = publish(server, version, seed=version)
        for client in clients:
            size = arrives(client, expected, version).manifest.total_bytes
    return size


class Requests:
    """A bare client that goes through a transfer step by step."""

    def __init__(self, server: SnapshotServer) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.rcvtimeo = int(PATIENCE * 1000)
        self.socket.plain_username = USER.encode()
        self.socket.plain_password = server.endpoint()["password"].encode()
        self.socket.connect(server.address)

    def ask(self, request: Poll | Fetch) -> tuple[object, list[bytes]]:
        self.socket.send(request.pack())
        header, *data = self.socket.recv_multipart()
        return unpack_reply(header), data

    def close(self) -> None:
        self.socket.close()
        self._context.term()


class RunningRelay:
    """A relay in a thread of this process; what ends it stands in `failure`."""

    def __init__(self, learner: Callable[[], dict[str, str] | None], **options: Any) -> None:
        self.relay = Relay(learner, options.pop("config", CONFIG), log=get_logger(), **options)
        self.failure: BaseException | None = None
        self.ended = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def sent(self) -> int:
        """Bytes of weights sent so far."""
        return self.relay.server.sent.bytes

    @property
    def address(self) -> str:
        return self.relay.server.address

    def near(self) -> list[Mapping[str, str]]:
        """What its neighbours find; nothing once it is closed."""
        return [] if self._closed else [self.relay.server.endpoint() | {"name": "near"}]

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.relay.stopped.set()
            self._thread.join()
            self.relay.close()

    def _run(self) -> None:
        try:
            self.relay.run()
        except BaseException as error:
            self.failure = error
        self.ended.set()


RelayOf = Callable[..., RunningRelay]


def eventually(holds: Callable[[], bool]) -> None:
    """Wait for what other threads and processes do without telling."""
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def serving(source: Snapshot, chunks: Callable[[int], bool] = lambda chunk: True) -> Callable[..., list[bytes]]:
    """A learner, for `ScriptedServer`, that answers for some chunks of one snapshot only."""

    def answer(request: Poll | Fetch) -> list[bytes]:
        if isinstance(request, Poll):
            return [] if request.have == source.name else [source.packed_manifest]
        if request.snapshot != source.name:
            return gone(request)
        return chunk_frames(source, request) if chunks(request.chunk) else []

    return answer


def serve(source: Snapshot) -> SnapshotServer:
    """A learner that serves one snapshot."""
    server = SnapshotServer(BindAddress("tcp://127.0.0.1:*"), CONFIG.credit)
    server.serve(source)
    return server
