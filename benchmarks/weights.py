"""Weights from a learner process to a generator process: GB/s over ZeroMQ on loopback against a plain memory copy.

`python -m benchmarks.weights`. Transfer means everything from the poll to verified bytes in shared memory.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np
import torch

from common.config import WeightsConfig
from generator.weights.weight_client import WeightClient
from learner.weight_server import WeightServer

TENSOR = (1024, 4096)


@dataclass(frozen=True)
class Result:
    """GB (10^9 bytes) per second; the memory copy is from warm to warm memory.

    Attributes:
        copy: what training waits for: the weights are copied into the snapshot's memory.
        publish: the same with checksums, until the snapshot is served.
    """

    gigabytes: float
    copy: float
    publish: float
    transfer: float
    memory_copy: float


def measure(mib: int = 512, rounds: int = 5, config: WeightsConfig | None = None) -> Result:
    """Publish and pull `mib` MiB of bfloat16 weights `rounds` times; the best round counts."""
    config = config or WeightsConfig()
    context = multiprocessing.get_context("spawn")
    pipe, child_pipe = context.Pipe()
    learner = context.Process(target=_learner, args=(child_pipe, mib, config), daemon=True)
    learner.start()
    endpoint = pipe.recv()
    client = WeightClient(lambda: endpoint, config)
    copied, published, pulled = [], [], []
    try:
        for version in range(rounds):
            pipe.send(version)
            copies, publications = pipe.recv()
            copied.append(copies)
            published.append(publications)
            weights = asyncio.run(client.next())
            pulled.append(weights.manifest.total_bytes / weights.seconds)
            size = weights.manifest.total_bytes
            weights.close()
    finally:
        client.close()
        pipe.send(None)
        learner.join()
    rates = (max(rates) / 1e9 for rates in (copied, published, pulled))
    return Result(size / 1e9, *rates, _memory_copy(size, rounds) / 1e9)


def _learner(pipe: Connection, mib: int, config: WeightsConfig) -> None:
    """Publish on request; answer with bytes per second of the copy, and of all of it."""
    source = torch.randn(TENSOR).to(torch.bfloat16)
    count = max(1, mib * (1 << 20) // source.nbytes)

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        return ((f"layer.{i}", source) for i in range(count))

    server = WeightServer(config)
    pipe.send(server.endpoint())
    while (version := pipe.recv()) is not None:
        began = time.perf_counter()
        copy = server.copy(version, tensors(), torch.bfloat16)
        copied = time.perf_counter()
        server.serve(copy)
        size = count * source.nbytes
        pipe.send((size / (copied - began), size / (time.perf_counter() - began)))
    server.close()


def _memory_copy(size: int, rounds: int) -> float:
    """Bytes per second of numpy's copy."""
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
    best = 0.0
    for _ in range(rounds):
        began = time.perf_counter()
        np.copyto(target, source)
        best = max(best, size / (time.perf_counter() - began))
    return best


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=512, help="size of the weights")
    args = parser.parse_args()
    result = measure(args.mib)
    print(
        f"{result.gigabytes:.2f} GB of weights: copy {result.copy:.2f} GB/s, publish {result.publish:.2f} GB/s, "
        f"transfer {result.transfer:.2f} GB/s, memory copy {result.memory_copy:.2f} GB/s"
    )


if __name__ == "__main__":
    main()
