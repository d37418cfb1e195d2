"""Weights for tests: random ones, scripted learners, and a lab that closes what a test has started."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import zmq

from common.config import WeightsConfig
from common.log import get_logger
from common.weights.follow import Endpoint
from common.weights.listener import USER
from common.weights.memory import MemoryFile, Snapshot
from common.weights.server import SnapshotServer
from common.weights.wire import Chunk, Fetch, Gone, Hello, Manifest, Poll, Welcome, unpack_reply, unpack_request
from generator.weights.shared_weights import SharedWeights, tensors
from generator.weights.weight_client import WeightClient
from learner.publish.weight_copy import copy_weights
from learner.publish.weight_server import WeightServer
from relay.relay import Relay
from tests.support.waiting import PATIENCE

CHUNK = 1 << 18
CREDIT = 3
CONFIG = WeightsConfig(shared_folder="off")
Tensors = dict[str, torch.Tensor]
Learner = Callable[[], Endpoint | None]
Relays = Callable[[], Sequence[Endpoint]]


def random_weights(seed: int, chunks: int = 5) -> Tensors:
    """Tensors of odd sizes, so many chunks in float32; each seed has moved a few numbers of those of the one before."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"embed": (chunks * 250, 251), "norm": (7,), "scalar": (), "empty": (0, 3), "proj": (333, 33)}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    for step in range(seed):
        moved = torch.rand(tensors["embed"].shape, generator=torch.Generator().manual_seed(step + 1)) < 0.004
        tensors["embed"][moved] *= 1.01
    return tensors


def snapshot(version: int, seed: int | None = None, name: str | None = None, chunks: int = 5) -> Snapshot:
    weights = random_weights(version if seed is None else seed, chunks)
    return copy_weights(version, weights.items(), torch.float32, CHUNK, snapshot=name).snapshot()


def arriving(manifest: Manifest) -> Snapshot:
    return Snapshot.arriving(manifest, MemoryFile(manifest.total_bytes))


def publish(server: WeightServer, version: int, seed: int | None = None, chunks: int = 5) -> Tensors:
    weights = random_weights(version if seed is None else seed, chunks)
    server.serve(server.copy(version, weights.items(), torch.float32))
    return weights


def assert_same(weights: SharedWeights, expected: Tensors) -> None:
    """All tensors arrived, bit by bit."""
    assert weights.manifest.names == list(expected)
    for name, tensor in tensors(weights.manifest, torch.from_numpy(np.fromfile(weights.path, np.uint8))):
        assert torch.equal(tensor, expected[name]), name


def pulled(client: WeightClient) -> SharedWeights:
    return asyncio.run(asyncio.wait_for(client.next(), PATIENCE))


def arrives(client: WeightClient, expected: Tensors, version: int | None = None) -> SharedWeights:
    with pulled(client) as weights:
        assert_same(weights, expected)
        assert version in (None, weights.version)
    return weights


def versions_arrive(server: WeightServer, clients: Sequence[WeightClient], versions: Iterable[int]) -> int:
    """Each of these versions is published and comes to all clients, bit by bit; the bytes of one."""
    size = 0
    for version in versions:
        expected = publish(server, version)
        for client in clients:
            size = arrives(client, expected, version).manifest.total_bytes
    return size


def chunk_frames(source: Snapshot, request: Fetch) -> list[bytes]:
    """The right answer to a request for a chunk, which may be a delta."""
    delta = source.deltas[request.chunk] if request.delta else None
    data = delta if delta is not None else source.chunks[request.chunk]
    return [Chunk(snapshot=source.name, chunk=request.chunk, delta=delta is not None).pack(), bytes(data)]


Answer = Callable[[Poll | Fetch], list[bytes]]
AnswerChunk = Callable[[Snapshot, Fetch], list[bytes]]


def following(versions: Sequence[Snapshot], answer: AnswerChunk = chunk_frames) -> Answer:
    """A script: each version is offered to clients that have the one before, and `answer` sends its chunks."""
    names = [version.name for version in versions]

    def serve(request: Poll | Fetch) -> list[bytes]:
        if isinstance(request, Poll):
            after = names.index(request.have) + 1 if request.have in names else 0
            return [versions[after].packed_manifest] if after < len(versions) else []
        if request.snapshot not in names:
            return [Gone(snapshot=request.snapshot).pack()]
        return answer(versions[names.index(request.snapshot)], request)

    return serve


class ScriptedServer:
    """Speaks the protocol as a script says: `answer(request)` returns the frames to send. It answers greetings."""

    def __init__(self, answer: Answer) -> None:
        self.requests: list[Poll | Fetch] = []
        self._answer = answer
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._address = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._closing = False
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def endpoint(self) -> Endpoint:
        return {"address": self._address}

    def near(self) -> list[Endpoint]:
        """Its entry for its neighbours, if it plays a relay."""
        return [self.endpoint() | {"name": "scripted"}]

    def fetched(self) -> set[int]:
        return {request.chunk for request in self.requests if isinstance(request, Fetch)}

    def _serve(self) -> None:
        while not self._closing:
            if self._socket.poll(20):
                client, body = self._socket.recv_multipart()
                request = unpack_request(body)
                if isinstance(request, Hello):
                    self._socket.send_multipart([client, Welcome(path=[]).pack()])
                    continue
                self.requests.append(request)
                if frames := self._answer(request):
                    self._socket.send_multipart([client, *frames])

    def close(self) -> None:
        self._closing = True
        self._thread.join()
        self._context.destroy(linger=0)


class Requests:
    """A bare client that goes through a transfer step by step."""

    def __init__(self, server: SnapshotServer | WeightServer) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.rcvtimeo = int(PATIENCE * 1000)
        self.socket.plain_username = USER.encode()
        self.socket.plain_password = server.endpoint()["password"].encode()
        self.socket.connect(server.address)

    def ask(self, request: Poll | Fetch | Hello) -> tuple[Any, list[bytes]]:
        self.socket.send(request.pack())
        header, *data = self.socket.recv_multipart()
        return unpack_reply(header), data

    def fetch(self, manifest: Manifest, chunk: int) -> bytes:
        reply, data = self.ask(Fetch(snapshot=manifest.snapshot, chunk=chunk))
        assert (reply.kind, reply.chunk) == ("chunk", chunk)
        return data[0]

    def close(self) -> None:
        self._context.destroy(linger=0)


class RunningRelay(Relay):
    def __init__(self, learner: Learner, config: WeightsConfig, **options: Any) -> None:
        super().__init__(learner, config, log=get_logger(), **options)
        self._thread = threading.Thread(target=self.run, daemon=True)
        self._thread.start()

    @property
    def sent(self) -> int:
        return self.server.sent.bytes

    def near(self) -> list[Mapping[str, str]]:
        """Its entry for its neighbours; none once it is closed."""
        return [] if self.stopped.is_set() else [self.server.endpoint() | {"name": "near"}]

    def close(self) -> None:
        self.stopped.set()
        self._thread.join()
        super().close()


class Lab:
    def __init__(self, config: WeightsConfig) -> None:
        self.config = config
        self._open: list[Any] = []

    def learner(self, **settings: Any) -> WeightServer:
        return self._opened(WeightServer(self.config.model_copy(update=settings)))

    def serving(self, source: Snapshot) -> SnapshotServer:
        server: SnapshotServer = self._opened(SnapshotServer(self.config))
        server.serve(source)
        return server

    def scripted(self, answer: Answer) -> ScriptedServer:
        return self._opened(ScriptedServer(answer))

    def requests(self, server: SnapshotServer | WeightServer) -> Requests:
        return self._opened(Requests(server))

    def client(
        self, learner: Learner, relays: Relays = tuple, timeout: float = PATIENCE, **settings: Any
    ) -> WeightClient:
        """By default patient: a machine that is busy loses no connection."""
        config = self.config.model_copy(update=settings)
        return self._opened(WeightClient(learner, config, relays=relays, timeout=timeout))

    def relay(self, learner: Learner, **options: Any) -> RunningRelay:
        return self._opened(RunningRelay(learner, **{"config": self.config, "timeout": PATIENCE} | options))

    def close(self, *started: Any) -> None:
        """Close these, or all that are still open."""
        for one in started or self._open[::-1]:
            self._open.remove(one)
            one.close()

    def _opened(self, one: Any) -> Any:
        self._open.append(one)
        return one
