"""A deterministic run is the same bit for bit when it is repeated, and when everything in it is killed on the way."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from redis.exceptions import RedisError

from common.config import BrokerConfig
from common.streams.broker import Broker, connect
from common.streams.journal import read_journal
from launcher.quickstart.tiny_model import build_model, build_tokenizer, save
from tests.conftest import RedisServer
from tests.support.quickstart import kill

pytestmark = pytest.mark.e2e
STEPS, BATCH, HELDOUT, SEED = 4, 6, 4, 11
TASKS = STEPS * BATCH + 3 * HELDOUT  # evaluated are versions 0, 2 and 4
DEADLINE = 400.0
REWARD = """
class LikesLetters:
    def score(self, outcome):
        text = outcome.response
        return sum(character.isascii() and character.isalpha() for character in text) / max(len(text), 1)
"""


class Run:
    """One run by `spo run`, on a Redis of its own."""

    def __init__(self, name: str, folder: Path, server: RedisServer) -> None:
        self.name, self.base, self.server, self.folder = name, folder, server, folder / "runs" / name
        self.broker = connect(BrokerConfig(url=server.url, dead_after=2.0), name)
        settings = {
            "run": {"name": name, "experiment": name, "output_dir": str(folder / "runs"), "steps": STEPS}
            | {"deterministic": True, "journal": True},
            "model": {"path": str(folder / "model"), "dtype": "float32", "max_model_len": 128},
            "data": {"train": str(folder / "train.jsonl"), "heldout": str(folder / "heldout.jsonl")}
            | {"max_prompt_tokens": 64},
            "sampler": {"batch_size": BATCH},
            "generator": {"max_attempts": 20},
            "learner": {"dtype": "float32", "lr": 1e-3, "schedule": "cosine", "mini_batches": 2, "token_budget": 256}
            | {"checkpoint_every": 2, "keep_checkpoints": 9},
            "episode": {"max_response_tokens": 24, "rollouts_every": 1, "reward": "somebodys:LikesLetters"},
            "eval": {"every": 2},
            "broker": {"url": server.url, "heartbeat": 0.5, "dead_after": 2.0},
        }
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(settings))

    def start(self) -> subprocess.Popen[str]:
        """`spo run`, anew or again."""
        command = [sys.executable, "-m", "launcher.cli", "run", str(self.base / f"{self.name}.yaml"), "--plain"]
        with (self.base / f"{self.name}.log").open("a") as log:
            arguments = [*command, "--redis", self.server.url]
            return subprocess.Popen(arguments, stderr=log, stdout=log, text=True)

    def wait_for_tasks(self, number: int, launcher: subprocess.Popen[str]) -> None:
        """Until so many tasks have been counted."""
        deadline, journal, last = time.monotonic() + DEADLINE, self.broker.key("journal"), b"0"
        while self.broker.counters().get("counted", 0) < number:
            assert launcher.poll() is None, self.log()
            assert time.monotonic() < deadline, self.log()
            # Every commit is an entry.
            for _, entries in self.broker.redis.xread({journal: last}, block=500):
                last = entries[-1][0]

    def log(self) -> str:
        return (self.base / f"{self.name}.log").read_text()[-3000:]

    def weights(self) -> dict[str, torch.Tensor]:
        """Weights and optimizer state of every checkpoint."""
        files = sorted(self.folder.glob("checkpoints/step_*/deepspeed/*.pt"))
        return {
            f"{file.relative_to(self.folder)} {name}": tensor
            for file in files
            for name, tensor in tensors(torch.load(file, weights_only=False))
        }

    def tracker(self) -> dict[str, np.ndarray]:
        """What the tracker knew at every checkpoint."""
        arrays = {}
        for file in sorted(self.folder.glob("checkpoints/tracker/*.npz")):
            with np.load(file) as loaded:
                # How often what was dispatched, and by whom, is in the books.
                arrays |= {f"{file.name} {name}": loaded[name] for name in loaded.files if name != "books"}
        return arrays

    def decisions(self) -> dict[str, list[Any]]:
        """Prompts and rewards in the order in which they were counted, and the batches."""
        entries = list(read_journal(self.broker))
        return {
            "rewards": [reward for entry in entries for reward in entry.rewards],
            "batches": [batch for entry in entries for batch in entry.batches],
            "evaluations": [dict(result) for result in self.broker.evaluations()],
        }

    def episodes(self, folder: str) -> dict[str, list[dict[str, Any]]]:
        """Lines of `rollouts` or `validation_data` by version, without what says when and by whom."""
        return {
            file.name: [without_names(json.loads(line)) for line in file.read_text().splitlines()]
            for file in sorted((self.folder / folder).glob("*.jsonl"))
        }


def tensors(tree: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in nested mappings and sequences, by where it is."""
    if isinstance(tree, torch.Tensor):
        yield path, tree
    elif isinstance(tree, dict | list | tuple):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from tensors(value, f"{path}.{key}")


def without_names(line: dict[str, Any]) -> dict[str, Any]:
    """An evaluation that was started anew has tasks of another name."""
    line["task_id"] = line["task_id"].rpartition("-")[2]
    return {name: value for name, value in line.items() if name not in ("seconds", "generator")}


@contextmanager
def running(run: Run) -> Iterator[list[subprocess.Popen[str]]]:
    """The launchers of a run, the newest last; ended by their process ids if a test fails."""
    launchers = [run.start()]
    try:
        yield launchers
    finally:
        if launchers[-1].poll() is None:
            launchers[-1].send_signal(signal.SIGINT)
            launchers[-1].wait(timeout=30)


def kill_when_there(broker: Broker, role: str) -> None:
    """SIGKILL the process of a role once it is there: what was killed before may have taken it along."""
    deadline = time.monotonic() + DEADLINE
    while True:
        try:
            return kill(broker, role)
        except (ValueError, ProcessLookupError, RedisError):
            assert time.monotonic() < deadline, f"there is not one {role}"
            time.sleep(0.05)


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """A random tiny model, few prompts, which come again and again, and a reward with many values."""
    tokenizer = build_tokenizer()
    save(build_model(tokenizer, seed=0), tokenizer, tmp_path / "model")
    for name, count in (("train", 12), ("heldout", HELDOUT)):
        rows = [json.dumps({"prompt": f"{name} {i}", "answer": str(i)}) for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    (tmp_path / "somebodys.py").write_text(REWARD)
    return tmp_path


def test_a_run_killed_at_five_random_points_ends_as_one_that_was_left_alone(
    inputs: Path, own_redis: RedisServer, redis_server: RedisServer
) -> None:
    alone, killed = Run("alone", inputs, redis_server), Run("killed", inputs, own_redis)
    drawn = random.Random(SEED)
    victims = drawn.sample(["generator", "sampler", "learner", "launcher", "redis"], 5)
    points = sorted(drawn.sample(range(1, TASKS), 5))
    with running(alone) as undisturbed, running(killed) as launchers:

        def again() -> None:
            launchers[-1].kill()
            launchers[-1].wait()
            launchers.append(killed.start())

        def restart_redis() -> None:
            own_redis.kill()
            own_redis.start()

        strikes: dict[str, Callable[[], None]] = {"launcher": again, "redis": restart_redis}
        for point, victim in zip(points, victims, strict=True):
            killed.wait_for_tasks(point, launchers[-1])
            strikes.get(victim, lambda victim=victim: kill_when_there(killed.broker, victim))()
        for run, launcher in ((alone, undisturbed[-1]), (killed, launchers[-1])):
            assert launcher.wait(timeout=DEADLINE) == 0, run.log()

    assert alone.decisions() == killed.decisions()
    assert len(alone.decisions()["batches"]) == STEPS
    assert len({reward for _, reward, _ in alone.decisions()["rewards"]}) > BATCH
    for folder, files in (("rollouts", STEPS), ("training_data", STEPS), ("validation_data", 3)):
        assert alone.episodes(folder) == killed.episodes(folder)
        assert len(alone.episodes(folder)) == files
    for left, right in ((alone.tracker(), killed.tracker()), (alone.weights(), killed.weights())):
        assert left.keys() == right.keys()
        for name, value in left.items():
            assert bytes(memoryview(np.asarray(value))) == bytes(memoryview(np.asarray(right[name]))), name
    assert {name.split()[0].split("/")[1] for name in alone.weights()} == {"step_2", "step_4"}
