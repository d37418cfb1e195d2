"""A learner and generators as processes, as far as weights go: driven through a pipe, and killed by tests."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch

from common.config import WeightsConfig
from common.weights.wire import checksum
from generator.weights.weight_client import WeightClient
from learner.weight_server import WeightServer
from tests.support.weights import publish, random_weights

SPAWN = multiprocessing.get_context("spawn")


class Process:
    """A process that answers each message with one; its first says that it is ready."""

    def __init__(self, target: Callable[..., None], *arguments: object) -> None:
        self.pipe, end = SPAWN.Pipe()
        self._process = SPAWN.Process(target=target, args=(end, *arguments), daemon=True)
        self._process.start()
        end.close()
        self.ready = self.pipe.recv()

    def __call__(self, message: object) -> Any:
        self.pipe.send(message)
        return self.pipe.recv()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


@contextlib.contextmanager
def processes() -> Iterator[Callable[..., Process]]:
    """Starts processes, which are killed at the end."""
    started: list[Process] = []

    def start(target: Callable[..., None], *arguments: object) -> Process:
        started.append(Process(target, *arguments))
        return started[-1]

    yield start
    for process in started:
        process.kill()


def learner(pipe: Connection, config: WeightsConfig) -> None:
    """Publishes a version for each number; at `sent` it tells the bytes it has sent; at `write` it stays writing."""
    server = WeightServer(config)
    pipe.send(server.endpoint())
    while (message := pipe.recv()) is not None:
        if message == "sent":
            pipe.send(server.sent.bytes)
        elif message == "write":
            server.copy(999, _endless(pipe), torch.float32)
        else:
            publish(server, message)
            pipe.send(server.endpoint())


def _endless(pipe: Connection) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights of which only the first ever comes."""
    yield next(iter(random_weights(999).items()))
    pipe.send("writing")
    threading.Event().wait()


def generator(pipe: Connection, config: WeightsConfig, endpoint: dict[str, str]) -> None:
    """At `next` it takes the next weights and keeps them; at `read` it tells version and checksum of what it keeps.

    A new endpoint tells it where the learner is now.
    """
    current = {"learner": endpoint}
    client = WeightClient(lambda: current["learner"], config)
    pipe.send(None)
    weights = None
    while (message := pipe.recv()) is not None:
        if isinstance(message, dict):
            current["learner"] = message
        elif message == "next":
            if weights is not None:
                weights.close()
            weights = asyncio.run(client.next())
        assert weights is not None or isinstance(message, dict)
        pipe.send(weights and (weights.version, checksum(weights.view(0, weights.manifest.total_bytes))))
