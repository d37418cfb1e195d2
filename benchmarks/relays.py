"""One learner's weights to many receivers: directly, behind one relay, and through chains of relays.

`python -m benchmarks.relays`, about two minutes. Learner, relays and receivers are processes with real sockets on
loopback; bytes are counted by the servers themselves. Loopback is as fast for 64 as for one, unlike a network, so the
same is measured once more behind a network card of a given rate (`benchmarks/slow_link.py`).
"""

from __future__ import annotations

import multiprocessing
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import numpy as np
import structlog

from benchmarks import options, slow_link
from common.config import WeightsConfig
from common.errors import reports_user_errors
from common.weights.follow import Follower, Sources
from common.weights.handover import HandedOver
from common.weights.memory import MemoryFile, Snapshot, Transfer
from common.weights.server import SnapshotServer
from common.weights.wire import CHUNK_BYTES, Manifest, checksum
from relay.relay import Relay

CONFIG = WeightsConfig(shared_folder="off")
RECEIVERS = (1, 8, 64)
CHAINS = (0, 1, 2, 4)
RECEIVING_PROCESSES = 4
SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class RelaysResult:
    """Per version: bytes that the learner and the relays sent, seconds until the last receiver has all."""

    learner: float
    relays: float
    seconds: float


class Sink:
    """Verifies weights and drops them; reports when they have arrived."""

    def __init__(self, done: queue.SimpleQueue[float]) -> None:
        self._done = done

    def begin(self, manifest: Manifest) -> Transfer:
        """Receive into memory of its own."""
        return Transfer(manifest, MemoryFile(manifest.total_bytes))

    def arrived(self, chunk: int, delta: memoryview | None) -> None:
        """Nothing to do: the follower has verified the chunk."""

    def end(self, transfer: Transfer) -> None:
        """Send the time."""
        self._done.put(time.monotonic())

    def take(self, manifest: Manifest, handed: HandedOver, seconds: float) -> None:
        """No memory is shared here."""
        handed.close()


def measure(mib: int, receivers: int, relays: int, gbit: float | None, rounds: int) -> RelaysResult:
    """Publish `mib` MiB `rounds` times after one that does not count; the median of the rounds.

    Args:
        relays: length of a chain of relays, from whose last one receivers pull; with 0 they pull from the learner.
        gbit: Gbit/s that the learner and each relay but the last can send (the last relay is beside its receivers);
            None means as fast as loopback.
    """
    with ExitStack() as stack:
        learner, endpoint = stack.enter_context(_process(_learner, mib))
        chain = []
        for number in range(relays or bool(gbit)):
            if gbit:
                card = stack.enter_context(_process(slow_link.run, endpoint["address"], gbit * 1e9 / 8, ends=False))
                endpoint |= {"address": card[1]}
            if number < relays:
                pipe, endpoint = stack.enter_context(_process(_relay, endpoint))
                chain.append(pipe)
        each, rest = divmod(receivers, RECEIVING_PROCESSES)
        counts = [each + (number < rest) for number in range(RECEIVING_PROCESSES)]
        sinks = [stack.enter_context(_process(_receivers, endpoint, count))[0] for count in counts if count]
        results = []
        for number in range(rounds + 1):
            before = _sent(learner), sum(map(_sent, chain))
            learner.send(number)
            began = learner.recv()
            seconds = max(sink.recv() for sink in sinks) - began
            results.append((_sent(learner) - before[0], sum(map(_sent, chain)) - before[1], seconds))
    return RelaysResult(*(median(values) for values in zip(*results[1:], strict=True)))


@contextmanager
def _process(target: object, *arguments: object, ends: bool = True) -> Iterator[tuple[Connection, Any]]:
    """A process, its pipe and the first message it sends; it ends at None, or is terminated."""
    pipe, child_pipe = SPAWN.Pipe()
    process = SPAWN.Process(target=target, args=(child_pipe, *arguments), daemon=True)  # type: ignore[arg-type]
    process.start()
    try:
        yield pipe, pipe.recv()
    finally:
        if ends:
            pipe.send(None)
        else:
            process.terminate()
        process.join()


def _sent(server: Connection) -> int:
    server.send("sent")
    return int(server.recv())


def _quiet() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))


def _learner(pipe: Connection, mib: int) -> None:
    """Publish a snapshot for each number received, and send the time it was published."""
    _quiet()
    data = np.random.default_rng(0).integers(0, 256, mib << 20, np.uint8)
    size = CHUNK_BYTES
    checksums = [checksum(data[start : start + size].data) for start in range(0, len(data), size)]
    server = SnapshotServer(CONFIG)
    pipe.send(server.endpoint())
    while (order := pipe.recv()) is not None:
        if order == "sent":
            pipe.send(server.sent.bytes)
            continue
        manifest = Manifest(
            snapshot=f"ab-{order}", version=order, total_bytes=len(data), chunk_bytes=size, checksums=checksums,
            names=["weights"], dtypes=["uint8"], shapes=[[len(data)]], offsets=[0],
        )  # fmt: skip
        pipe.send(time.monotonic())
        file = MemoryFile(len(data))
        file.write(0, data.data)
        server.serve(Snapshot.whole(manifest, file))
    server.close()


def _relay(pipe: Connection, upstream: dict[str, str]) -> None:
    _quiet()
    relay = Relay(lambda: upstream, CONFIG, log=structlog.get_logger())
    thread = threading.Thread(target=relay.run)
    thread.start()
    pipe.send(relay.server.endpoint())
    while pipe.recv() is not None:
        pipe.send(relay.server.sent.bytes)
    relay.stopped.set()
    thread.join()
    relay.close()


def _receivers(pipe: Connection, endpoint: dict[str, str], count: int) -> None:
    """Run `count` receivers, each with its own socket; send the time at which all have the next snapshot."""
    _quiet()
    done: queue.SimpleQueue[float] = queue.SimpleQueue()
    stopped = threading.Event()
    followers = [
        Follower(
            Sources(lambda: endpoint), Sink(done), CONFIG, timeout=120.0, stopped=stopped, log=structlog.get_logger()
        )
        for _ in range(count)
    ]
    threads = [threading.Thread(target=follower.run) for follower in followers]
    for thread in threads:
        thread.start()
    pipe.send("ready")

    def tell() -> None:
        while True:
            pipe.send(max(done.get() for _ in range(count)))

    threading.Thread(target=tell, daemon=True).start()
    pipe.recv()
    stopped.set()
    for thread in threads:
        thread.join()


@reports_user_errors
def main() -> None:
    parser = options.Parser(__doc__)
    parser.add_argument("--mib", type=options.positive, default=64, help="size of the weights")
    parser.add_argument("--gbit", type=options.above_zero, default=2.0, help="rate of the learner's network card")
    parser.add_argument("--receivers", type=options.positive, nargs="+", default=RECEIVERS, help="a row each")
    parser.add_argument("--chains", type=options.at_least(0), nargs="*", default=CHAINS, help="relays; a row each")
    args = parser.parse_args()
    size = (args.mib << 20) / 1e6

    print(f"{size:.1f} MB of weights, chunks of {CHUNK_BYTES >> 20} MiB")
    print("\n| receivers | through | learner sends, MB | relay sends, MB | seconds | seconds, card |")
    print("|---|---|---|---|---|---|")
    for receivers in args.receivers:
        for relays in (0, 1):
            fast = measure(args.mib, receivers, relays, None, rounds=3)
            slow = measure(args.mib, receivers, relays, args.gbit, rounds=3 if relays else 1)
            print(
                f"| {receivers} | {'one relay' if relays else 'directly'} | {fast.learner / 1e6:,.1f} "
                f"| {fast.relays / 1e6:,.1f} | {fast.seconds:.2f} | {slow.seconds:.2f} |",
                flush=True,
            )
    print(f"\nThe card sends {args.gbit:g} Gbit/s: {size / 125 / args.gbit:.2f} s a copy.")

    if not args.chains:
        return
    print("\n| relays in the chain | seconds | seconds if each waited for the whole |")
    print("|---|---|---|")
    for relays in args.chains:
        chained = measure(args.mib, 1, relays, 1.0, rounds=3)
        print(f"| {relays} | {chained.seconds:.2f} | {size / 125 * max(1, relays):.2f} |", flush=True)
    print("\nEach hop but the last has a card of 1 Gbit/s.")


if __name__ == "__main__":
    main()
