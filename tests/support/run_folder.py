"""Run folders as a run leaves them, without a run: configuration, metrics, episodes, evaluations, summary."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import yaml

from common.config import dump_config
from common.config.load import parse_config
from tests.support.episode_rows import CONVERSATION, TOKENS, keep, keep_trained

BEGAN = 1_700_000_000.0
COUNTERS = {"dispatched": 60, "counted": 60, "finished": 60, "evaluated": 12, "rewarded": 48, "batched": 48}
GPU = {
    "gpu/count": 1.0, "gpu/utilisation": 0.9, "gpu/least_utilisation": 0.9, "gpu/memory_gb": 60.0,
    "gpu/memory_share": 0.7, "gpu/watts": 600.0,
}  # fmt: skip
PASSWORD = {"url": "redis://user:hunter2@10.0.0.1:6379/0"}
PANELS = (
    "summary", "reward", "before-and-after", "gpus", "throughput", "time", "staleness", "tracker", "correction",
    "optimization", "lengths", "endings", "queues", "processes", "counts", "configuration",
)  # fmt: skip


def make_run(folder: Path, **sections: Mapping[str, Any]) -> Path:
    """A run folder with nothing but its configuration."""
    folder.mkdir(parents=True)
    own = {"run": {"name": folder.name, "experiment": folder.name, "output_dir": str(folder.parent), "steps": 6}}
    own |= {"model": {"path": "policy"}, "data": {"train": "train.jsonl", "heldout": "heldout.jsonl"}}
    for name, values in sections.items():
        own[name] = {**own.get(name, {}), **values}
    (folder / "config.yaml").write_text(dump_config(parse_config(own)))
    return folder


def change_config(folder: Path, *, without: Sequence[str] = (), **sections: Mapping[str, Any]) -> None:
    """Change values of the written configuration, add unknown keys, and leave keys out."""
    values = yaml.safe_load((folder / "config.yaml").read_text())
    for name, changed in sections.items():
        values[name] = {**values.get(name, {}), **changed}
    for key in without:
        section, _, name = key.partition(".")
        del values[section][name]
    (folder / "config.yaml").write_text(yaml.safe_dump(values))


def write_metrics(
    folder: Path,
    version: int,
    values: Mapping[str, float],
    process: str = "sampler",
    time: float | None = None,
    histograms: Mapping[str, Any] | None = None,
) -> None:
    """Append a line to the metrics of a run folder; by default ten seconds after the version before."""
    line = {"time": BEGAN + 10 * version if time is None else time, "version": version, "process": process}
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({**line, "values": dict(values), "histograms": dict(histograms or {})}) + "\n")


def add_evaluation(folder: Path, version: int, rewards: Mapping[str, Sequence[float]], **story: Any) -> None:
    """A complete evaluation: the rewards of the responses to each prompt."""
    for prompt_id, of_prompt in rewards.items():
        for i, reward in enumerate(of_prompt):
            messages = [{"role": "assistant", "content": f"answer {i} of version {version}"}]
            keep(
                folder, version, f"e{version}-{prompt_id}-{i}", {"messages": messages, **story}, reward=reward,
                prompt_id=prompt_id, prompt=f"question {prompt_id}", where="validation_data", kind="eval",
            )  # fmt: skip


def add_summary(folder: Path, **values: Any) -> None:
    """The figures of a finished run."""
    summary = {"finished": True, "steps": 6, "counters": COUNTERS, "folder": str(folder)}
    summary |= {"seconds": {"engine start": 10.0, "training": 50.0}}
    (folder / "summary.json").write_text(json.dumps(summary | values))


def add_versions(folder: Path) -> None:
    """The versions of three processes; the learner has a package that the others lack."""
    packages = {"spo-trainer": "0.1.0", "torch": "2.13.0"}
    own = {"learner": {"deepspeed": "0.19.8"}, "sampler": {}, "generator-1": {}}
    joined = [{"process": name, "python": "3.11.7", "packages": packages | more} for name, more in own.items()]
    (folder / "versions.jsonl").write_text("\n".join(map(json.dumps, joined)) + "\n", encoding="utf-8")


@patch("os.fsync", lambda _: None)  # no disk is waited for
def finished_run(folder: Path, *, seed: int = 0, gain: float = 0.1, **sections: Mapping[str, Any]) -> Path:
    """A whole run of six steps whose reward rises by `gain` a step, evaluated at versions 0, 3 and 6."""
    make_run(folder, run={"seed": seed, **sections.pop("run", {})}, **sections)
    for version in range(1, 7):
        write_metrics(folder, version, {"reward/mean": 0.2 + gain * version, "staleness/mean": 1.0})
        learner = {"seconds/wait": 2.0, "seconds/train": 8.0, "tokens/model": 100.0, "tokens/total": 200.0}
        write_metrics(folder, version, learner, "learner")
        generator = {"generator/seconds": 10.0 * version, "generator/waiting_for_tasks_seconds": 5.0 * version}
        write_metrics(folder, version, generator | {"generator/tokens": 40.0 * version}, "generator-1")
    add_evaluation(folder, 0, {"a": [0.0, 0.0], "b": [1.0, 1.0]})
    add_evaluation(folder, 3, {"a": [1.0, 0.0], "b": [1.0, 1.0]})
    add_evaluation(folder, 6, {"a": [1.0, 1.0], "b": [0.0, 1.0]})
    add_summary(folder)
    add_versions(folder)
    return folder


def write_step(folder: Path, step: int, reward: float | None = None) -> None:
    """Everything that all processes of a run measure around one step."""
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
        "actor/clip_low": 0.01, "actor/clip_high": 0.02, "actor/drift": 0.01, "tokens/total": 900.0,
        "seconds/wait": 1.0, "seconds/train": 20.0, "seconds/publish": 1.0, "rollout_corr/eff_sample_size": 0.95,
        "rollout_corr/masked_fraction": 0.02, "rollout_corr/seq_masked_fraction": 0.01, "staleness/age_0": 0.4,
        "staleness/age_1": 0.6, **{f"rollout_corr/age_{age}/{name}": 0.9 for age in (0, 1) for name in
        ("k3_kl", "fraction", "ratio_mean", "truncated_fraction", "weight_mean", "masked_fraction", "eff_sample_size")},
        "process/memory_mb": 900.0, "tokens/per_second_per_gpu": 45.0, "gpu/mfu": 0.4, **GPU,
    }  # fmt: skip
    write_metrics(folder, step, learner, "learner", time + 1)
    for name in ("generator-1", "generator-2"):
        generator = {
            "generator/tokens_per_second": 300.0, "generator/episodes": 50.0 * step, "generator/seconds": 30.0 * step,
            "generator/waiting_for_tasks_seconds": 18.0 * step, "generator/waiting_for_tasks_fraction": 0.6,
            "generator/pause_ms_per_update": 80.0, "process/memory_mb": 2000.0, **GPU, "engine/batch_size": 60.0,
            "engine/cache_used": 0.7, "engine/prefix_hits": 0.5, "engine/preemptions": 2.0,
            "generator/tokens_per_second_per_gpu": 300.0,
        }  # fmt: skip
        write_metrics(folder, step, generator, name, time + 2)
    if step % 5 == 0:
        figures = {"accuracy": reward, "reward": reward, "avg@4": reward, "pass@4": min(1.0, reward + 0.2)}
        values = {f"{of}{name}": value for name, value in figures.items() for of in ("", "easy/", "hard/")}
        write_metrics(folder, step, {f"validation/{name}": value for name, value in values.items()}, time=time + 3)


@patch("os.fsync", lambda _: None)
def full_run(folder: Path, steps: int = 12) -> Path:
    """A run folder with something for each panel."""
    make_run(folder, run={"steps": 40}, broker=PASSWORD)
    for step in range(1, steps + 1):
        write_step(folder, step)
    change = {"step": 3, "key": "learner.lr", "from": 1e-6, "to": 1e-5, "time": BEGAN}
    (folder / "changes.jsonl").write_text(json.dumps(change) + "\n", encoding="utf-8")
    (folder / "chaos.json").write_text('{"checks": [{"name": "each task once"}]}')
    add_versions(folder)
    add_summary(folder, finished=False, steps=steps)
    write_episodes(folder)
    add_evaluation(folder, 0, {"e10-0": [0.0], "e10-1": [0.5]})
    add_evaluation(folder, 10, {"e10-0": [1.0], "e10-1": [0.0]})
    add_tracker(folder, {"p-t1": 5, "p-t2": 9, "p-t3": 1})
    return folder


def add_tracker(folder: Path, visits: Mapping[str, int]) -> None:
    """The tracker of a checkpoint: how often each prompt was drawn."""
    path = folder / "checkpoints/tracker/step_10.npz"
    path.parent.mkdir(parents=True)
    ids, values = np.array([name.encode() for name in visits]), np.linspace(1.0, 2.0, len(visits))
    np.savez(path, prompt_ids=ids, visits=[*visits.values()], alpha=values, beta=np.ones(len(visits)))


def write_episodes(folder: Path) -> None:
    """Training episodes: one with tokens that was trained on, one cut off, one skipped, and 58 plain ones."""
    short = {"messages": [{"role": "assistant", "content": "It is 4."}]}
    keep(folder, 10, "t1", {"messages": CONVERSATION, **TOKENS}, reward=0.25, tool_calls=2, turns=3)
    keep_trained(folder, 11, "t1")
    for i in range(2, 60):
        keep(folder, 10, f"t{i}", short, prompt=f"How much is {i} + {i}?", reward=float(i % 2), reason="stop")
    keep(folder, 10, "t60", short, reason="length", reward=0.0)
    keep(folder, 10, "t61", status="set_aside", reason="ToolUnavailable: no sandbox", reward=0.0)


class SavedPage:
    """The data of a saved page, which has only its own scripts, and its charts by name, the comparison's first."""

    def __init__(self, path: Path) -> None:
        text = path.read_text()
        assert text.count("<script") == text.count("</script>") == 4
        (data,) = re.findall(r'id="data">([^<]*)</script>', text)
        self.data: dict[str, Any] = json.loads(data)
        panels = [*filter(None, [self.data["comparison"]]), *self.data["panels"][self.data["runs"][0]["name"]]]
        self.charts = {chart["name"]: chart for panel in reversed(panels) for chart in panel["charts"]}
