"""Helpers of the weight tests: random weights, and a learner that a test can corrupt, starve or restart."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import numpy as np
import torch
import zmq

from common.config import WeightsConfig
from common.weights.server import SnapshotServer
from common.weights.snapshot import Snapshot
from common.weights.wire import Chunk, Fetch, Gone, Hello, Poll, Welcome, unpack_reply, unpack_request
from generator.shared_weights import SharedWeights
from generator.weight_client import WeightClient
from learner.snapshot import take_snapshot
from learner.weight_server import WeightServer

CHUNK = 1 << 20
PATIENCE = 30.0  # seconds until a test gives up; nothing waits that long
CONFIG = WeightsConfig(chunk_mib=1, credit=3)


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


def snapshot(version: int, seed: int, mib: int = 5) -> Snapshot:
    """Random weights as a learner serves them."""
    return take_snapshot(version, random_weights(seed, mib).items(), torch.float32, CHUNK)


def chunk_frames(source: Snapshot, request: Fetch) -> list[bytes]:
    """The right answer to a request for a chunk."""
    header = Chunk(snapshot=request.snapshot, chunk=request.chunk).pack()
    return [header, bytes(source.chunks[request.chunk])]


def gone(request: Fetch) -> list[bytes]:
    """The answer to a request for a chunk of a snapshot that is no more."""
    return [Gone(snapshot=request.snapshot).pack()]


def pulled(client: WeightClient) -> SharedWeights:
    return asyncio.run(asyncio.wait_for(client.next(), PATIENCE))


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


class Requests:
    """A bare client that goes through a transfer step by step."""

    def __init__(self, server: SnapshotServer) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.rcvtimeo = int(PATIENCE * 1000)
        self.socket.connect(server.address)

    def ask(self, request: Poll | Fetch) -> tuple[object, list[bytes]]:
        self.socket.send(request.pack())
        header, *data = self.socket.recv_multipart()
        return unpack_reply(header), data

    def close(self) -> None:
        self.socket.close()
        self._context.term()
