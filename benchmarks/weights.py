"""GB/s of weights from a learner process to a generator process, by each way of transfer, beside a plain memory copy.

`python -m benchmarks.weights`. Transfer means everything from the poll to verified bytes in shared memory; all ways are
measured in turns. Both ends are on this machine, even for the ways that are meant for several machines.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

import numpy as np
import torch

from benchmarks import options
from common.config import WeightsConfig
from common.curve import make_keys
from common.errors import reports_user_errors
from generator.weights.weight_client import WeightClient
from learner.publish.weight_server import WeightServer

TENSOR = (1024, 4096)
SHARED, PLAIN, CURVE = "shared memory", "ZeroMQ", "CURVE"
WAYS = (SHARED, PLAIN, CURVE)
# Forked from a process that has imported all that learners need: each would take seconds for torch alone.
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["learner.publish.weight_server"])


@dataclass(frozen=True)
class WeightsResult:
    """GB (10^9 bytes) per second; the memory copy is from warm to warm memory.

    Attributes:
        copy: what training waits for: the weights are copied into the snapshot's memory.
        publish: the same with checksums, until the snapshot is served.
        transfers: by way.
        sender_cpu, receiver_cpu: seconds of CPU time that a GB took by each way at either end, in the round in which it
            took least: depends little on what else runs.
    """

    gigabytes: float
    copy: float
    publish: float
    transfers: dict[str, float]
    sender_cpu: dict[str, float]
    receiver_cpu: dict[str, float]
    memory_copy: float

    @property
    def transfer(self) -> float:
        """The rate within a machine if no memory is shared."""
        return self.transfers[PLAIN]


def measure(mib: int = 512, rounds: int = 5, ways: Sequence[str] = (SHARED, PLAIN)) -> WeightsResult:
    """Publish and pull `mib` MiB of bfloat16 weights `rounds` times each way; the best round counts."""
    copied, published, copies = 0.0, 0.0, 0.0
    pulled = dict.fromkeys(ways, 0.0)
    sender_cpu, receiver_cpu = dict.fromkeys(ways, float("inf")), dict.fromkeys(ways, float("inf"))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        make_keys(folder / "keys")
        ends = {way: stack.enter_context(_ends(way, mib, folder)) for way in ways}
        for version in range(rounds):
            for way, (pipe, client) in ends.items():
                before = time.process_time()
                pipe.send(version)
                copy, publication, learner_before = pipe.recv()
                copied, published = max(copied, copy), max(published, publication)
                weights = asyncio.run(client.next())
                size = weights.manifest.total_bytes
                pulled[way] = max(pulled[way], size / weights.seconds)
                weights.close()
                receiver = time.process_time() - before
                pipe.send(None)
                sender = pipe.recv() - learner_before
                receiver_cpu[way] = min(receiver_cpu[way], receiver / size * 1e9)
                sender_cpu[way] = min(sender_cpu[way], sender / size * 1e9)
            copies = max(copies, _memory_copy(size))
    transfers = {way: rate / 1e9 for way, rate in pulled.items()}
    return WeightsResult(size / 1e9, copied / 1e9, published / 1e9, transfers, sender_cpu, receiver_cpu, copies / 1e9)


@contextmanager
def _ends(way: str, mib: int, folder: Path) -> Iterator[tuple[Pipe, WeightClient]]:
    """A learner that publishes on request, and its client."""
    config = WeightsConfig(
        shared_folder=str(folder / "shared") if way == SHARED else "off",
        curve_dir=str(folder / "keys") if way == CURVE else None,
    )
    pipe, child_pipe = FORKED.Pipe()
    learner = FORKED.Process(target=_learner, args=(child_pipe, mib, config), daemon=True)
    learner.start()
    endpoint = pipe.recv()
    client = WeightClient(lambda: endpoint, config)
    try:
        yield pipe, client
    finally:
        client.close()
        pipe.send("end")
        learner.join()


def _learner(pipe: Pipe, mib: int, config: WeightsConfig) -> None:
    """Publish on request; answer with bytes per second of the copy and of all of it, and the CPU time so far.

    At None, answer with the CPU time alone.
    """
    source = torch.randn(TENSOR).to(torch.bfloat16)
    count = max(1, mib * (1 << 20) // source.nbytes)

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        return ((f"layer.{i}", source) for i in range(count))

    server = WeightServer(config)
    pipe.send(server.endpoint())
    while (version := pipe.recv()) != "end":
        if version is None:
            pipe.send(time.process_time())
            continue
        began = time.perf_counter()
        copy = server.copy(version, tensors(), torch.bfloat16)
        copied = time.perf_counter()
        server.serve(copy)
        size = count * source.nbytes
        rates = size / (copied - began), size / (time.perf_counter() - began)
        pipe.send((*rates, time.process_time()))
    server.close()


def _memory_copy(size: int) -> float:
    """Bytes per second of numpy's copy."""
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
    began = time.perf_counter()
    np.copyto(target, source)
    return size / (time.perf_counter() - began)


@reports_user_errors
def main() -> None:
    parser = options.Parser(__doc__)
    parser.add_argument("--mib", type=options.positive, default=512, help="size of the weights")
    parser.add_argument("--rounds", type=options.positive, default=5, help="the best counts")
    args = parser.parse_args()
    result = measure(args.mib, args.rounds, WAYS)
    print(
        f"{result.gigabytes:.2f} GB of weights: copy {result.copy:.2f} GB/s, publish {result.publish:.2f} GB/s, "
        f"memory copy {result.memory_copy:.2f} GB/s"
    )
    print("| transport | GB/s | of plain ZeroMQ | s of CPU a GB: sender | receiver |\n|---|---|---|---|---|")
    for way, rate in result.transfers.items():
        cpu = f"{result.sender_cpu[way]:.2f} | {result.receiver_cpu[way]:.2f}"
        print(f"| {way} | {rate:.3g} | {rate / result.transfer:.2f} | {cpu} |")


if __name__ == "__main__":
    main()
