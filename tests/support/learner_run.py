"""A run whose learner is a process, and whose sampler and generators are the test."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import redis
import yaml
from safetensors.torch import load_file

from common.messages import Batch, Step
from common.payload import encode_payload
from common.streams.batches import StepReader
from common.streams.broker import Broker
from tests.support.forked import Forked, forked_module
from tests.support.learner import learner_config, make_samples

STEPS = 6


class Run:
    """A run whose sampler and generators are this test."""

    def __init__(self, url: str, name: str, folder: Path, model: str, **learner: Any) -> None:
        self.folder, self.model, self.log = folder, model, folder / f"{name}.log"
        config = learner_config(
            model,
            folder,
            run={"name": name, "steps": STEPS, "experiment": name},
            broker={"url": url, "wait": 60} | learner.pop("broker", {}),
            **{"checkpoint_every": 2} | learner,
        )
        self.config = folder / f"{name}.yaml"
        self.config.write_text(yaml.safe_dump(config.model_dump(mode="json")), encoding="utf-8")
        self.checkpoints = folder / name / "checkpoints"
        self.broker = Broker(redis.Redis.from_url(url), name)
        self.processes: list[Forked] = []

    def start(self, *arguments: str, **variables: str) -> Forked:
        environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
        command = ["-c", str(self.config), "--local_rank=0", *arguments]
        self.processes.append(forked_module("learner.cli", command, environment=environment, log=self.log))
        return self.processes[-1]

    def send(self, number: int, *, missing: tuple[int, ...] = (), by_turn: bool = False) -> None:
        send_batch(self.broker, number, missing=missing, by_turn=by_turn)

    def steps(self) -> list[Step]:
        return StepReader(self.broker).read()

    def wait(self, condition: Callable[[], bool], process: Forked) -> None:
        deadline = time.monotonic() + 120
        while not condition():
            assert process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)

    def wait_for(self, version: int, process: Forked) -> None:
        reader = StepReader(self.broker)
        while not any(step.version >= version for step in reader.read(block_ms=500)):
            assert process.poll() is None, self.log.read_text()

    def left(self) -> tuple[int, int]:
        """Batches and payloads still in Redis."""
        batches = self.broker.redis.xlen(self.broker.key("batches"))
        return batches, len(self.broker.redis.keys(self.broker.key("payload:*").replace("{", "[{]")))

    def weights(self) -> dict[str, np.ndarray]:
        return load_file(self.checkpoints / f"step_{STEPS}" / "hf" / "model.safetensors")

    def finish(self, process: Forked) -> int:
        self.broker.finish()
        return process.wait(timeout=60)


def lines(run: Run) -> list[str]:
    return [line for line in run.log.read_text().splitlines() if line.startswith("error:")]


def send_batch(broker: Broker, number: int, *, missing: tuple[int, ...] = (), by_turn: bool = False) -> None:
    """Put batch `number` on its stream, and its payloads but those `missing`.

    Args:
        by_turn: say each sample's advantage once for each of its two turns, and nothing of use for the whole.
    """
    payloads, advantages = make_samples(12, seed=number, version=number)
    ids = [f"{number}-{index}" for index in range(len(payloads))]
    for index, (sample_id, payload) in enumerate(zip(ids, payloads, strict=True)):
        if index not in missing:
            broker.redis.set(broker.key(f"payload:{sample_id}"), encode_payload(payload))
    batch = Batch(
        batch_id=number,
        sample_ids=ids,
        advantages=[0.0] * len(payloads) if by_turn else advantages,
        turn_advantages=[[advantage] * 2 for advantage in advantages] if by_turn else None,
        rewards=[float(advantage > 0) for advantage in advantages],
        tokens=[len(payload.token_ids) for payload in payloads],
    )
    broker.redis.xadd(broker.key("batches"), {"batch": batch.pack()})
