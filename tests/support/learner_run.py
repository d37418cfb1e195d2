"""Runs of the learner as a process; the test plays their sampler and generators."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import redis
import yaml
from safetensors.torch import load_file

from common.files import tracker_path
from common.messages import Batch, Step
from common.payload import encode_payload
from common.streams.broker import Broker
from common.streams.steps import StepReader
from tests.support.forked import Forked, forked_module
from tests.support.learner import learner_config, make_samples

STEPS, SAMPLES = 6, 12


class Run:
    """A run of six steps with twelve samples each; unless others are named, its newest process is meant."""

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

    def send(self, *numbers: int, missing: Iterable[int] = (), by_turn: bool = False, kept: bool = False) -> None:
        """Put batches on their stream, and their payloads except those `missing`.

        Args:
            by_turn: give each of a sample's two turns its advantage, and the whole sample a useless one.
            kept: what the learner computes for their tokens is recorded.
        """
        for number in numbers:
            payloads, advantages = make_samples(SAMPLES, seed=number, version=number)
            for index in set(range(SAMPLES)) - set(missing):
                self.broker.redis.set(self.broker.key(f"payload:{number}-{index}"), encode_payload(payloads[index]))
            batch = Batch(
                batch_id=number,
                sample_ids=[f"{number}-{index}" for index in range(SAMPLES)],
                advantages=[0.0] * SAMPLES if by_turn else advantages,
                turn_advantages=[[advantage] * 2 for advantage in advantages] if by_turn else None,
                rewards=[float(advantage > 0) for advantage in advantages],
                tokens=[len(payload.token_ids) for payload in payloads],
                kept=[True] * SAMPLES if kept else None,
            )
            self.broker.redis.xadd(self.broker.key("batches"), {"batch": batch.pack()})

    def steps(self) -> list[Step]:
        return StepReader(self.broker).read()

    def starts(self) -> list[int]:
        """The versions that learners began with."""
        return [step.version for step in self.steps() if not step.metrics]

    def wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 600
        while not condition():
            assert self.processes[-1].poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)

    def wait_for(self, version: int) -> None:
        reader = StepReader(self.broker)
        while not any(step.version >= version for step in reader.read(block_ms=500)):
            assert self.processes[-1].poll() is None, self.log.read_text()

    def kill(self) -> None:
        self.processes[-1].kill()

    def stop(self, code: int = 0) -> None:
        """Send SIGTERM, and wait for the end with this exit code."""
        self.processes[-1].send_signal(signal.SIGTERM)
        self.end(code)

    def end(self, code: int, *ranks: Forked) -> None:
        asked = ranks or self.processes[-1:]
        assert [process.wait(timeout=600) for process in asked] == [code] * len(asked), self.log.read_text()

    def write_tracker(self, version: int) -> None:
        """Leave the sampler's state beside the checkpoint of this version."""
        path = tracker_path(self.checkpoints.parent, version)
        path.parent.mkdir()
        np.savez(path)

    def left(self) -> tuple[int, int]:
        """Batches and payloads still in Redis."""
        batches = self.broker.redis.xlen(self.broker.key("batches"))
        return batches, len(self.broker.redis.keys(self.broker.key("payload:*").replace("{", "[{]")))

    def finish(self, *ranks: Forked) -> None:
        """Train to the end, which leaves nothing in Redis."""
        self.wait_for(STEPS)
        self.broker.finish()
        self.end(0, *ranks)
        assert self.left() == (0, 0)

    def errors(self, *ranks: Forked, code: int = 2) -> list[str]:
        """The lines that say why ranks end with this code."""
        self.end(code, *ranks)
        assert "Traceback" not in self.log.read_text()
        return [line for line in self.log.read_text().splitlines() if line.startswith("error:")]


def assert_same_end(run: Run, other: Run) -> None:
    ours, theirs = (load_file(one.checkpoints / f"step_{STEPS}" / "hf" / "model.safetensors") for one in (run, other))
    assert ours.keys() == theirs.keys()
    assert all((ours[name] == theirs[name]).all() for name in ours)
