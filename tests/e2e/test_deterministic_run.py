"""A deterministic run is the same bit for bit when it is repeated, and when everything in it is killed on the way."""

from __future__ import annotations

import random
import re
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from redis.exceptions import RedisError

from common.config import BrokerConfig
from common.streams.broker import Broker, connect
from common.streams.ledger import read_journal
from tests.conftest import RedisServer
from tests.support.whole_run import importing, json_lines, kill, started, write_run

pytestmark = pytest.mark.e2e
STEPS, BATCH, HELDOUT = 4, 6, 4
SEED = 74  # the learner is killed while step 3 is in no checkpoint yet, and continues from step 2
TASKS = STEPS * BATCH + 3 * HELDOUT  # evaluated are versions 0, 2 and 4
DEADLINE = 600.0
REWARD = """
class LikesLetters:
    def score(self, outcome):
        text = outcome.response
        return sum(character.isascii() and character.isalpha() for character in text) / max(len(text), 1)
"""
SECTIONS = {
    "run": {"steps": STEPS, "deterministic": True, "journal": True},
    "sampler": {"batch_size": BATCH},
    "generator": {"max_attempts": 20, "max_concurrency": 1},
    "learner": {"lr": 1e-3, "schedule": "cosine", "mini_batches": 2, "token_budget": 256}
    | {"checkpoint_every": 2, "keep_checkpoints": 9},
    # A reward with many values.
    "episode": {"max_response_tokens": 24, "rollouts_every": 1, "reward": "my_parts:LikesLetters"},
    "eval": {"every": 2},
    "broker": {"dead_after": 2.0},
}


class Run:
    """One run by `spo run`, on a Redis of its own; few prompts, which come again and again."""

    def __init__(self, name: str, base: Path, server: RedisServer, stack: ExitStack) -> None:
        self.server, self.folder, self.stack = server, base / "runs" / name, stack
        self.log, self.environment = base / f"{name}.log", importing(base, {"my_parts": REWARD})
        self.broker = connect(BrokerConfig(url=server.url, dead_after=2.0), name)
        self.config = write_run(base, name, SECTIONS, train=12, heldout=HELDOUT)
        self.start()

    def start(self) -> None:
        """`spo run`, the first time or again."""
        command = ("run", self.config, "--plain", "--redis", self.server.url)
        self.launcher: subprocess.Popen[str] = self.stack.enter_context(
            started(self.log, *command, environment=self.environment)
        )

    def restart(self) -> None:
        self.launcher.kill()
        self.launcher.wait()
        self.start()

    def wait_for_tasks(self, number: int) -> None:
        """Wait until this many tasks have been counted."""
        deadline, journal, last = time.monotonic() + DEADLINE, self.broker.key("journal"), b"0"
        while self.broker.counters().get("counted", 0) < number:
            assert self.launcher.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < deadline, self.log.read_text()[-3000:]
            # Every commit is an entry.
            for _, entries in self.broker.redis.xread({journal: last}, block=500):
                last = entries[-1][0]

    def left(self) -> dict[str, Any]:
        """What the run decided, sampled and trained, by name: arrays as bytes, lines without times and generators."""
        entries = list(read_journal(self.broker))
        left: dict[str, Any] = {
            "rewards": [reward for entry in entries for reward in entry.rewards],
            "batches": [batch for entry in entries for batch in entry.batches],
            "evaluations": [dict(result) for result in self.broker.evaluations()],
        }
        for folder in ("rollouts", "training_data", "validation_data"):
            for file in sorted((self.folder / folder).glob("*.jsonl")):
                left[f"{folder} {file.name}"] = [without_names(line) for line in json_lines(file)]
        for file in sorted(self.folder.glob("checkpoints/tracker/*.npz")):
            with np.load(file) as loaded:
                # The counts also say how often a task was dispatched, and by which process.
                left |= {f"{file.name} {name}": loaded[name].tobytes() for name in loaded.files if name != "books"}
        for file in sorted(self.folder.glob("checkpoints/step_*/deepspeed/*.pt")):
            for name, tensor in tensors(torch.load(file, weights_only=False)):
                left[f"{file.relative_to(self.folder)} {name}"] = bytes(memoryview(np.asarray(tensor)))
        return left


def tensors(tree: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in nested mappings and sequences, by where it is."""
    if isinstance(tree, torch.Tensor):
        yield path, tree
    elif isinstance(tree, dict | list | tuple):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from tensors(value, f"{path}.{key}")


def without_names(line: dict[str, Any]) -> dict[str, Any]:
    """An evaluation that was started again has tasks of another name."""
    line["task_id"] = line["task_id"].rpartition("-")[2]
    return {name: value for name, value in line.items() if name not in ("seconds", "generator")}


def kill_when_there(broker: Broker, role: str) -> None:
    """SIGKILL the process of a role once it is there: what was killed before may have taken it along."""
    deadline = time.monotonic() + DEADLINE
    while True:
        try:
            return kill(broker, role)
        except (ValueError, ProcessLookupError, RedisError):
            assert time.monotonic() < deadline, f"there is not one {role}"
            time.sleep(0.05)


def test_a_run_killed_at_five_points_ends_as_one_left_alone(
    tmp_path: Path, own_redis: RedisServer, redis_server: RedisServer
) -> None:
    drawn = random.Random(SEED)
    victims = drawn.sample(["generator", "sampler", "learner", "launcher", "redis"], 5)
    points = sorted(drawn.sample(range(1, TASKS), 5))
    with ExitStack() as stack:
        alone = Run("alone", tmp_path, redis_server, stack)
        killed = Run("killed", tmp_path, own_redis, stack)

        def restart_redis() -> None:
            own_redis.kill()
            own_redis.start()

        strikes: dict[str, Callable[[], None]] = {"launcher": killed.restart, "redis": restart_redis}
        for point, victim in zip(points, victims, strict=True):
            killed.wait_for_tasks(point)
            strikes.get(victim, lambda victim=victim: kill_when_there(killed.broker, victim))()
        for run in (alone, killed):
            assert run.launcher.wait(timeout=DEADLINE) == 0, run.log.read_text()[-3000:]

    left, left_of_killed = alone.left(), killed.left()
    assert left.keys() == left_of_killed.keys()
    for name, value in left.items():
        assert value == left_of_killed[name], name
    assert len(left["batches"]) == STEPS
    assert len({reward for _, reward, *_ in left["rewards"]}) > BATCH
    counts = Counter(name.split()[0] for name in left)
    assert (counts["rollouts"], counts["training_data"], counts["validation_data"]) == (STEPS, STEPS, 3)
    learner_log = (killed.folder / "logs" / "learner.log").read_text()
    assert re.search(r"serving weights .*version=2$", learner_log, re.MULTILINE), "it continued from a checkpoint"
    checkpoints = {name.split("/")[1] for name in left if name.startswith("checkpoints/")}
    assert checkpoints == {"step_2", "step_4"}
