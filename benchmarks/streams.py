"""Samples per second through streams and sampler, with a generator and a learner that do no work.

Everything else is the real thing: a redis-server, `spo-sampler` in a process of its own, finish and commit
scripts, payloads by key, batches that are decoded, announced and released. `python -m benchmarks.streams`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import redis
import yaml

from common.messages import SampleHeader, Step
from common.payload import Payload
from common.streams.batches import BatchInbox
from common.streams.broker import Broker
from common.streams.tasks import Finished, TaskInbox
from launcher.run.embedded_redis import find_redis_server, free_port

RUN = "benchmark"
PROMPTS = 10_000
# Redis's append-only file: synced before every answer, every second, or not written at all.
SYNC = ("always", "everysec", "off")


@dataclass(frozen=True)
class Result:
    """Figures of one run."""

    tokens: int
    samples: int
    samples_per_second: float
    redis_peak_mb: float
    dispatched: int
    counted: int
    cpu_us_per_sample: dict[str, float]


def measure(tokens: int, samples: int, batch_size: int = 1024, sync: str = "always") -> Result:
    """Send `samples` samples of `tokens` tokens from prompt to release, and time it from the first batch on."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config, url = _prepare(folder, samples // batch_size, batch_size)
        port = url.rsplit(":", 1)[1].split("/")[0]
        arguments = ["--port", port, "--bind", "127.0.0.1", "--dir", name, "--save", ""]
        arguments += ["--appendonly", "no" if sync == "off" else "yes"]
        arguments += [] if sync == "off" else ["--appendfsync", sync]
        server = subprocess.Popen([find_redis_server(), *arguments], stdout=subprocess.DEVNULL)
        client = redis.Redis.from_url(url)
        wait_for_redis(client)
        me = [sys.executable, "-m", "benchmarks.streams", "--url", url, "--role"]
        children = [
            subprocess.Popen([sys.executable, "-m", "sampler.cli", "--config", str(config)], stderr=subprocess.DEVNULL),
            subprocess.Popen([*me, "generator", "--tokens", str(tokens)]),
        ]
        learner = subprocess.Popen([*me, "learner", "--steps", str(samples // batch_size)], stdout=subprocess.PIPE)
        try:
            seconds, cpu_seconds = map(float, learner.communicate(timeout=600)[0].split())
            used = dict(zip(("sampler", "generator"), map(_cpu_seconds, children), strict=True))
            used |= {"learner": cpu_seconds, "redis": _cpu_seconds(server)}
            for child in children:
                child.wait(timeout=60)
            counters = Broker(client, RUN).counters()
            peak = client.info("memory")["used_memory_peak"] / 1e6
        finally:
            for child in (*children, learner, server):
                child.kill()
                child.wait()
        timed = samples // batch_size * batch_size - batch_size
        cpu = {name: round(1e6 * spent / samples, 1) for name, spent in used.items()}
        return Result(tokens, timed, timed / seconds, peak, counters["dispatched"], counters["counted"], cpu)


def _cpu_seconds(process: subprocess.Popen[bytes]) -> float:
    times = psutil.Process(process.pid).cpu_times()
    return float(times.user + times.system)


def _prepare(folder: Path, steps: int, batch_size: int) -> tuple[Path, str]:
    rows = (json.dumps({"prompt": f"prompt {i}", "answer": str(i)}) for i in range(PROMPTS))
    (folder / "train.jsonl").write_text("\n".join(rows))
    url = f"redis://127.0.0.1:{free_port()}/0"
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
    """A learner whose steps take no time; prints the seconds from its first batch to its last."""
    inbox, started = BatchInbox(broker).acquire(), 0.0
    inbox.announce(Step(version=0))
    for version in range(1, steps + 1):
        while (batch := inbox.next(1000)) is None:
            pass
        payloads = inbox.payloads(batch.sample_ids)
        if None in payloads:
            raise SystemExit(f"batch {batch.batch_id}: a payload is missing")
        inbox.announce(Step(version=version))
        inbox.release_before(version)
        started = started or time.perf_counter()
    print(time.perf_counter() - started, time.process_time())


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--role", choices=["all", "generator", "learner"], default="all", help=argparse.SUPPRESS)
    parser.add_argument("--url", default="", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a sample")
    parser.add_argument("--samples", type=int, default=102_400, help="samples to send")
    args = parser.parse_args()
    if args.role == "all":
        for sync in SYNC:
            print(f"append-only file {sync}: {measure(args.tokens, args.samples, sync=sync)}")
        return
    broker = Broker(redis.Redis.from_url(args.url), RUN)
    if args.role == "generator":
        generate(broker, args.tokens)
    else:
        learn(broker, args.steps)


if __name__ == "__main__":
    main()
