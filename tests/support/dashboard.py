"""A dashboard served within the test's process, and run folders that have something for each of its panels."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from launcher.dashboard.app import Service
from launcher.dashboard.server import Server
from launcher.dashboard.watch import Watch
from launcher.folder.run_folder import find_runs
from tests.support.episode_rows import CONVERSATION, TOKENS, keep, keep_trained
from tests.support.run_folders import write_metrics

BEGAN = 1_700_000_000.0
CONFIG = {
    "run": {"name": "mine", "steps": 40},
    "model": {"path": "nowhere"},
    "learner": {"lr": 1e-5, "schedule": "constant"},
    "broker": {"url": "redis://user:hunter2@10.0.0.1:6379/0"},
}
PANELS = (
    "reward", "throughput", "staleness", "tracker", "correction", "optimization", "lengths", "endings", "queues",
    "processes", "configuration",
)  # fmt: skip


class Dashboard:
    """A server of some run folders in a thread; may be stopped and started again on its port."""

    def __init__(self, folders: Sequence[Path], port: int = 0, token: str | None = None) -> None:
        self.folders, self.port, self.token = folders, port, token

    def __enter__(self) -> Dashboard:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """The page's address."""
        return f"http://127.0.0.1:{self.port}/"

    def start(self) -> None:
        """Serve; returns once connections are taken."""
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        listener.listen(64)
        self.port = listener.getsockname()[1]
        watch = Watch(find_runs(self.folders))
        self._server = Server(Service(watch).app(["127.0.0.1"], self.token, f"spo_{self.port}"), watch)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._server.serve([listener])), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End it; its port is free afterwards."""
        self._server.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive()


def begin_run(folder: Path, config: dict[str, Any] | None = None) -> Path:
    """A run folder as it is when a run has just begun."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(json.dumps(config or CONFIG), encoding="utf-8")
    return folder


def write_step(folder: Path, step: int, reward: float | None = None) -> None:
    """What all processes of a run write around one step."""
    reward = 0.2 + 0.02 * step if reward is None else reward
    time = BEGAN + 30.0 * step
    whole = np.arange(-0.5, 4.5).tolist()
    ages = {"edges": whole, "counts": [1, 3, 9, 2]}
    percent = {"edges": (np.arange(0, 101) - 0.5).tolist(), "counts": [(i * 7 + step) % 13 for i in range(100)]}
    sampler = {
        "reward/mean": reward, "reward/std": 0.4, "reward/correct": reward, "reward/format": 0.9,
        "staleness/mean": 1.5, "staleness/max": 3.0, "staleness/in_flight_mean": 0.5, "staleness/in_queue_mean": 1.0,
        "tracker/variance_ratio": 0.8, "tracker/variance_ratio_low": 0.7, "tracker/variance_ratio_high": 0.9,
        "tracker/calibration_error": 0.1, "tracker/visited": 0.5, "tracker/always_solved": 0.1,
        "tracker/never_solved": 0.3, **{f"tracker/reward_where_value_is_0.{i}": 0.05 + i / 10 for i in range(10)},
        "waiting/learner_seconds": 3.0, "waiting/generators_seconds": 9.0, "response_length/mean": 40.0 + step,
        "response_length/max": 90.0, "response_length/clip_ratio": 0.1, "num_turns/mean": 1.5, "tool_calls/mean": 0.5,
        "tool_calls/error_ratio": 0.05, "episode/seconds_mean": 2.0, "episode/seconds_max": 9.0, "ending/stop": 0.9,
        "ending/length": 0.1, "samples/dispatched": 64.0 * step, "samples/counted": 60.0 * step,
        "samples/set_aside": 1.0 * step, "samples/set_aside/ToolUnavailable": 1.0 * step, "queue/tasks": 12.0,
        "queue/batches": 1.0, "redis/used_mb": 20.0 + step, "process/cpu_seconds": 4.0, "process/memory_mb": 150.0,
    }  # fmt: skip
    histograms = {"staleness/total": ages, "tracker/value_percent": percent, "tracker/visits": ages}
    write_metrics(folder, step, sampler, time=time, histograms=histograms)
    learner = {
        "actor/pg_loss": 0.1, "actor/loss": 0.1, "actor/entropy": 0.5, "actor/grad_norm": 1.0, "actor/lr": 1e-5,
        "actor/clip_low": 0.01, "actor/clip_high": 0.02, "actor/drift": 0.01, "tokens/per_second": 900.0,
        "seconds/wait": 1.0, "seconds/train": 20.0, "seconds/publish": 1.0, "rollout_corr/eff_sample_size": 0.95,
        "rollout_corr/masked_fraction": 0.02, "rollout_corr/seq_masked_fraction": 0.01, "staleness/age_0": 0.4,
        "staleness/age_1": 0.6, **{f"rollout_corr/age_{age}/{name}": 0.9 for age in (0, 1) for name in
        ("kl", "fraction", "ratio_mean", "truncated_fraction", "weight_mean", "masked_fraction", "eff_sample_size")},
        "process/memory_mb": 900.0,
    }  # fmt: skip
    write_metrics(folder, step, learner, process="learner", time=time + 1)
    for name in ("generator-1", "generator-2"):
        generator = {
            "generator/tokens_per_second": 300.0, "generator/episodes": 50.0 * step,
            "generator/waiting_for_tasks_fraction": 0.6, "generator/pause_ms_per_update": 80.0,
            "process/memory_mb": 2000.0,
        }  # fmt: skip
        write_metrics(folder, step, generator, process=name, time=time + 2)
    if step % 5 == 0:
        figures = {"accuracy": reward, "reward": reward, "avg@4": reward, "pass@4": min(1.0, reward + 0.2)}
        values = {f"{of}{name}": value for name, value in figures.items() for of in ("", "easy/", "hard/")}
        write_metrics(folder, step, {f"validation/{name}": value for name, value in values.items()}, time=time + 3)


def full_run(folder: Path, steps: int = 12) -> Path:
    """A run folder with something for each panel."""
    begin_run(folder)
    for step in range(1, steps + 1):
        write_step(folder, step)
    change = {"step": 3, "key": "learner.lr", "from": 1e-6, "to": 1e-5, "time": BEGAN}
    (folder / "changes.jsonl").write_text(json.dumps(change) + "\n", encoding="utf-8")
    packages = {"spo-trainer": "0.1.0", "torch": "2.13.0"}
    own = {"learner": {"deepspeed": "0.19.8"}, "sampler": {}, "generator-1": {}}
    joined = [{"process": name, "python": "3.11.7", "packages": packages | more} for name, more in own.items()]
    (folder / "versions.jsonl").write_text("\n".join(map(json.dumps, joined)) + "\n", encoding="utf-8")
    write_episodes(folder)
    tracker = folder / "checkpoints" / "tracker"
    tracker.mkdir(parents=True)
    ids = np.array([b"p-t1", b"p-t2", b"p-t3"])
    np.savez(tracker / "step_10.npz", prompt_ids=ids, visits=[5, 9, 1], alpha=[2.0, 1.0, 1.0], beta=[1.0, 1.0, 3.0])
    return folder


def write_episodes(folder: Path) -> None:
    """Some episodes of each kind."""
    long = {"messages": [{"role": "assistant", "content": "It is 4."}]}
    keep(folder, 10, "t1", {"messages": CONVERSATION, **TOKENS}, reward=0.25, tool_calls=2, turns=3)
    keep_trained(folder, 11, "t1")
    for i in range(2, 60):
        keep(folder, 10, f"t{i}", long, prompt=f"How much is {i} + {i}?", reward=float(i % 2), reason="stop")
    keep(folder, 10, "t60", long, reason="length", reward=0.0)
    keep(folder, 10, "t61", status="set_aside", reason="ToolUnavailable: no sandbox", reward=0.0)
    for i in range(4):
        keep(folder, 10, f"e10-{i}", long, where="validation_data", kind="eval", reward=float(i % 2))
