"""Samples a second, and CPU time a sample, through streams and sampler; generator and learner do no work of their own.

Everything else is the real thing: a redis-server, `spo-sampler` in a process of its own, finish and commit
scripts, payloads by key, batches that are decoded, announced and released. `python -m benchmarks.streams`; with
`--beside FOLDER`, another checkout is measured in turns with this one.

The rate needs a machine that does nothing else. CPU time a sample does not, if two checkouts are measured in turns.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import redis
import yaml

from benchmarks import options
from benchmarks.turns import compared
from common.errors import reports_user_errors
from common.messages import SampleHeader, Step
from common.payload import Payload
from common.streams.batches import BatchInbox
from common.streams.broker import Broker
from common.streams.tasks import Finished, TaskInbox
from launcher.run.embedded_redis import find_redis_server

RUN = "benchmark"
PROMPTS = 10_000
BATCH = 1024
# Redis's append-only file: synced before every answer, every second, or not written at all.
SYNC = ("always", "everysec", "off")


@dataclass(frozen=True)
class StreamsResult:
    """Figures of one run: from the learner's first batch to its last, so that no process's start is part of them."""

    tokens: int
    samples: int
    samples_per_second: float
    redis_peak_mb: float
    dispatched: int
    counted: int
    cpu_us_per_sample: dict[str, float]

    def rows(self) -> dict[str, float]:
        """What the table shows."""
        cpu = {f"CPU a sample, {name}, µs": used for name, used in self.cpu_us_per_sample.items()}
        total = {"CPU a sample, all, µs": sum(self.cpu_us_per_sample.values())}
        return {"samples/s": self.samples_per_second, **cpu, **total, "Redis' memory at most, MB": self.redis_peak_mb}


def measure(tokens: int, samples: int, batch_size: int = BATCH, sync: str = "always") -> StreamsResult:
    """Send `samples` samples of `tokens` tokens from prompt to release, and time it from the first batch on."""
    steps = samples // batch_size
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # A socket, as `spo run` starts it.
        config, url = _prepare(folder, steps, batch_size)
        arguments = ["--port", "0", "--unixsocket", url.removeprefix("unix://"), "--dir", name, "--save", ""]
        arguments += ["--appendonly", "no" if sync == "off" else "yes"]
        arguments += [] if sync == "off" else ["--appendfsync", sync]
        server = subprocess.Popen([find_redis_server(), *arguments], stdout=subprocess.DEVNULL)
        client = redis.Redis.from_url(url)
        wait_for_redis(client)
        me = [sys.executable, "-m", "benchmarks.streams", "--url", url, "--role"]
        sampler = [sys.executable, "-m", "sampler.cli", "--config", str(config)]
        learner = subprocess.Popen(
            [*me, "learner", "--steps", str(steps)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        processes: dict[str, subprocess.Popen[Any]] = {
            "sampler": subprocess.Popen(sampler, stderr=subprocess.DEVNULL),
            "generator": subprocess.Popen([*me, "generator", "--tokens", str(tokens)]),
            "learner": learner,
            "redis": server,
        }
        try:
            lines = islice(learner.stdout or (), 2)  # at the first batch, and at the last
            turns = [(float(line), {name: _cpu_seconds(p) for name, p in processes.items()}) for line in lines]
            (began, at_first), (ended, at_last) = turns
            learner.communicate()
            for role in ("sampler", "generator"):
                processes[role].wait(timeout=60)
            counters = Broker(client, RUN).counters()
            peak = client.info("memory")["used_memory_peak"] / 1e6
        finally:
            for process in processes.values():
                process.kill()
                process.wait()
        timed = (steps - 1) * batch_size
        cpu = {name: 1e6 * (used - at_first[name]) / timed for name, used in at_last.items()}
        return StreamsResult(
            tokens, timed, timed / (ended - began), peak, counters["dispatched"], counters["counted"], cpu
        )


def _cpu_seconds(process: subprocess.Popen[Any]) -> float:
    """CPU seconds of the process and of its children that have ended: those of Redis rewrite its append-only file."""
    return float(sum(psutil.Process(process.pid).cpu_times()[:4]))


def _prepare(folder: Path, steps: int, batch_size: int) -> tuple[Path, str]:
    rows = (json.dumps({"prompt": f"prompt {i}", "answer": str(i)}) for i in range(PROMPTS))
    (folder / "train.jsonl").write_text("\n".join(rows))
    url = f"unix://{folder}/redis.sock"
    config = {
        "run": {"name": RUN, "steps": steps, "output_dir": str(folder)},
        "model": {"path": "none"},
        "data": {"train": str(folder / "train.jsonl")},
        "sampler": {"batch_size": batch_size, "max_staleness": 1, "drift": {"mode": "ledger"}},
        "eval": {"every": 0},
        "broker": {"url": url},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path, url


@contextmanager
def redis_server(folder: Path, port: int) -> Iterator[redis.Redis]:
    """A server whose append-only file is synced every second."""
    arguments = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", "", "--appendonly", "yes"]
    server = subprocess.Popen([find_redis_server(), *arguments, "--appendfsync", "everysec"], stdout=subprocess.DEVNULL)
    client = redis.Redis(port=port)
    try:
        wait_for_redis(client)
        yield client
    finally:
        server.kill()
        server.wait()


def wait_for_redis(client: redis.Redis) -> None:
    """Return once the server answers."""
    while True:
        try:
            client.ping()
            return
        except redis.ConnectionError:
            time.sleep(0.02)


def generate(broker: Broker, tokens: int) -> None:
    """A generator whose episodes take no time: real payloads of random numbers."""
    rng = np.random.default_rng(0)
    prompt = tokens // 8
    payload = Payload(
        rng.integers(0, 150_000, tokens).astype(np.int32),
        np.array([[prompt, tokens]], np.int32),
        -rng.random(tokens - prompt).astype(np.float32),
        np.array([[0, 0, tokens - prompt]], np.int32),
    )
    inbox = TaskInbox(broker, "benchmark")
    while not broker.finished():
        results = []
        for delivery in inbox.take(64, 50):
            task = delivery.task
            header = SampleHeader(
                task_id=task.task_id,
                prompt_id=task.prompt_id,
                kind=task.kind,
                reward=float(rng.random() < 0.5),
                tokens=tokens,
                model_tokens=tokens - prompt,
                oldest_version=task.min_version,
                newest_version=task.min_version,
            )
            results.append(Finished(delivery.entry_id, header, payload))
        inbox.finish(results)


def learn(broker: Broker, steps: int) -> None:
    """A learner whose steps take no time; prints when its first batch was done, and its last."""
    inbox = BatchInbox(broker).acquire()
    inbox.announce(Step(version=0))
    for version in range(1, steps + 1):
        while (batch := inbox.next(1000)) is None:
            pass
        payloads = inbox.payloads(batch.sample_ids)
        if None in payloads:
            raise SystemExit(f"batch {batch.batch_id}: a payload is missing")
        inbox.announce(Step(version=version))
        inbox.release_before(version)
        if version in (1, steps):
            print(time.perf_counter(), flush=True)
    sys.stdin.read()  # until the caller has read this process's CPU time


@reports_user_errors
def main() -> None:
    """Print a table for each setting of the append-only file."""
    parser = options.Parser(__doc__)
    parser.add_argument("--role", choices=["all", "generator", "learner"], default="all", help=argparse.SUPPRESS)
    parser.add_argument("--url", default="", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--tokens", type=options.at_least(8), default=1024, help="tokens of a sample")
    parser.add_argument("--samples", type=options.at_least(2 * BATCH), default=102_400, help="samples to send")
    parser.add_argument("--sync", choices=SYNC, nargs="+", default=SYNC, help="when the append-only file is synced")
    parser.add_argument("--beside", type=options.checkout, help="another checkout, measured in turns with this one")
    parser.add_argument("--turns", type=options.positive, default=1)
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of the table")
    args = parser.parse_args()
    if args.role != "all":
        broker = Broker(redis.Redis.from_url(args.url), RUN)
        if args.role == "generator":
            generate(broker, args.tokens)
        else:
            learn(broker, args.steps)
    elif args.json:
        print(json.dumps(measure(args.tokens, args.samples, sync=args.sync[0]).rows()))
    else:
        for sync in args.sync:
            arguments = ["--tokens", str(args.tokens), "--samples", str(args.samples), "--sync", sync]
            table = compared("benchmarks.streams", arguments, args.beside, args.turns)
            print(f"{args.tokens:,} tokens, append-only file {sync}\n\n{table}\n", flush=True)


if __name__ == "__main__":
    main()
