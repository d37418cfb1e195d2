"""The real half of `benchmarks.group_free`: two runs side by side, one of which waits for groups, in turns.

Each has a sampler and a generator of its own (`spo-sampler`, `spo-generator` with vLLM) on one Redis server. The model
is tiny and knows nothing, its tool sleeps (`benchmarks.slow_tool`). The learner is this process: it takes each batch
and its payloads, publishes the same weights as the next version, and learns nothing, in no time.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import redis
import yaml

from benchmarks.slow_tool import CALLS, LONGEST, SCALE
from benchmarks.streams import wait_for_redis
from common.config import load_config
from common.messages import Batch, Step
from common.streams.batches import BatchInbox
from common.streams.broker import Broker
from launcher.run.embedded_redis import find_redis_server
from tests.support.ports import free_port

BATCH, GROUP = 24, 8
PROMPTS = 1000
METHODS: dict[str, dict[str, Any]] = {"free": {"method": "spo"}, "grouped": {"method": "grpo", "group_size": GROUP}}
TOOL = "benchmarks.slow_tool:SlowTool"
START = 600.0  # seconds within which a batch must come; on a busy machine a generator takes minutes to start


def measure(staleness: int, phases: Sequence[tuple[float, int]]) -> Iterator[dict[str, Any]]:
    """Play the phases, in each of which the two runs take turns.

    Args:
        staleness: `sampler.max_staleness`; (staleness + 1) * `BATCH` episodes are under way.
        phases: sigma, and `ahead` as in `MethodRun.phase`.

    Yields:
        Of each phase `sigma`, `staleness`, `ahead`, the number of its first task, and by the run's name the seconds of
        `MethodRun.phase`.
    """
    plan = [(0.0, 0), *phases]  # the first one warms up
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = stack.enter_context(_Redis(folder)).url
        parameters = _save_model(folder / "model")
        runs = {
            name: stack.enter_context(MethodRun(name, folder, url, staleness, plan, parameters)) for name in METHODS
        }
        for number, (sigma, ahead) in enumerate(plan):
            # Which one comes first changes, since the episodes it leaves behind end while the other is measured.
            order = list(runs) if number % 2 else list(runs)[::-1]
            playing = {name: runs[name].phase(ahead) for name in order}
            times = {name: [next(phase) for _ in range(ahead + 1)] for name, phase in playing.items()}
            for phase in playing.values():
                next(phase, None)
            if number:
                first = sum((before + staleness + 1) * BATCH for _, before in plan[:number])
                yield {"sigma": sigma, "staleness": staleness, "ahead": ahead, "first_task": first, **times}


class MethodRun:
    """Sampler and generator in processes of their own, and the learner's side of their streams."""

    def __init__(
        self, name: str, folder: Path, url: str, staleness: int, plan: Sequence[tuple[float, int]], parameters: Any
    ) -> None:
        from learner.publish.weight_server import WeightServer

        self._held = staleness + 1  # batches that end a phase
        self._parameters = parameters
        schedule = [((ahead + self._held) * BATCH, sigma) for sigma, ahead in plan]
        path = write_config(name, folder, url, staleness, schedule)
        config = load_config(path)
        broker = Broker(redis.Redis.from_url(url), config.run.name)
        self._inbox = BatchInbox(broker).acquire()
        self._weights = WeightServer(config.learner.weights)
        self._trained = 0  # versions
        self._log = folder / f"{name}.log"
        self._weights.serve(self._weights.copy(0, self._parameters, config.model.dtype))
        self._inbox.set_address(self._weights.endpoint())
        with self._log.open("w") as log:
            self._processes = [
                subprocess.Popen([sys.executable, "-m", module, "--config", str(path)], stdout=log, stderr=log)
                for module in ("sampler.cli", "generator.cli")
            ]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self._weights.close()

    def phase(self, ahead: int) -> Iterator[float]:
        """Start as many episodes as may be under way, and take batches until all of them have been used.

        Args:
            ahead: after each of so many batches the next version is published, and so new episodes start. 0: a wave.

        Yields:
            Seconds from the start to each of the first `ahead` + 1 batches; those that follow end what is under way.
        """
        self._publish()
        started = time.perf_counter()
        for number in range(ahead + self._held):
            self._train()
            seconds = time.perf_counter() - started
            if number < ahead:
                self._publish()
            if number <= ahead:
                yield seconds

    def _train(self) -> None:
        batch = self._next()
        if None in self._inbox.payloads(batch.sample_ids):
            raise SystemExit(f"batch {batch.batch_id}: a payload is missing; see {self._log}")
        self._trained += 1
        self._inbox.release_before(self._trained)

    def _publish(self) -> None:
        """Serve and announce the newest version; after a phase those between were never seen by any process.

        One announcement: of several the sampler might see the first alone, and start episodes that are then older.
        """
        if self._trained > 0:
            self._weights.serve(self._weights.copy(self._trained, self._parameters, "float32"))
        self._inbox.announce(Step(version=self._trained))

    def _next(self) -> Batch:
        deadline = time.monotonic() + START + 2 * CALLS * LONGEST * SCALE
        while (batch := self._inbox.next(1000)) is None:
            dead = [process.args for process in self._processes if process.poll() is not None]
            if dead or time.monotonic() > deadline:
                raise SystemExit(f"no batch came ({dead or 'all processes live'}):\n{self._log.read_text()[-2000:]}")
        return batch


class _Redis:
    """A redis-server of its own."""

    def __init__(self, folder: Path) -> None:
        port = free_port()
        self.url = f"redis://127.0.0.1:{port}/0"
        command = [find_redis_server(), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""]
        self._process = subprocess.Popen([*command, "--appendonly", "yes"], stdout=subprocess.DEVNULL)
        wait_for_redis(redis.Redis.from_url(self.url))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


def _save_model(folder: Path) -> list[tuple[str, Any]]:
    """A random model, and its parameters."""
    from launcher.quickstart.tiny_model import build_model, build_tokenizer, save

    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed=0)
    save(model, tokenizer, folder)
    return list(model.named_parameters())


def write_config(name: str, folder: Path, url: str, staleness: int, schedule: list[tuple[int, float]]) -> Path:
    """The configuration of one of the runs, in a file; `schedule` is that of `SlowTool`."""
    data = folder / "train.jsonl"
    data.write_text("\n".join(json.dumps({"prompt": f"{i}?", "answer": str(i)}) for i in range(PROMPTS)))
    config = {
        "run": {"name": name, "experiment": name, "steps": 1_000_000, "output_dir": str(folder)},
        "model": {"path": str(folder / "model"), "dtype": "float32", "max_model_len": 384},
        "data": {"train": str(data), "max_prompt_tokens": 64},
        "algorithm": METHODS[name],
        "sampler": {
            "batch_size": BATCH,
            "max_staleness": staleness,
            "drift": {"mode": "constant"},
            "selection": {"criterion": "uniform"},
        },
        "generator": {"max_concurrency": (staleness + 1) * BATCH},
        "episode": {
            "tools": [TOOL],
            "tool_options": {TOOL: {"schedule": [list(phase) for phase in schedule]}},
            "call_format": "benchmarks.slow_tool:EveryTurn",
            "max_assistant_turns": CALLS + 1,
            "max_response_tokens": 300,
            "tool_timeout": 2 * LONGEST * SCALE,
            "rollouts_every": 0,
        },
        "eval": {"every": 0},
        "broker": {"url": url},
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    return path
