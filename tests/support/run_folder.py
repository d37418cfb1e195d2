"""Run folders as a run leaves them, without a run: configuration, metrics, evaluations, summary."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from common.config import dump_config
from common.config.load import parse_config
from tests.support.episode_rows import keep

COUNTERS = {"dispatched": 60, "counted": 60, "finished": 60, "evaluated": 12, "rewarded": 48, "batched": 48}


def make_run(folder: Path, **sections: Mapping[str, Any]) -> Path:
    """A run folder with nothing but its configuration."""
    folder.mkdir(parents=True)
    own = {"run": {"name": folder.name, "experiment": folder.name, "output_dir": str(folder.parent), "steps": 6}}
    own |= {"model": {"path": "policy"}, "data": {"train": "train.jsonl", "heldout": "heldout.jsonl"}}
    for name, values in sections.items():
        own[name] = {**own.get(name, {}), **values}
    (folder / "config.yaml").write_text(dump_config(parse_config(own)))
    return folder


def add_metrics(folder: Path, version: int, process: str, time: float | None = None, **values: float) -> None:
    """An entry of metrics.jsonl; of the names, `__` stands for a slash."""
    named = {name.replace("__", "/"): value for name, value in values.items()}
    entry = {"time": 1000.0 + 10 * version if time is None else time, "version": version, "process": process}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(entry | {"values": named}) + "\n")


def add_evaluation(folder: Path, version: int, rewards: Mapping[str, Sequence[float]], **story: Any) -> None:
    """A complete evaluation: the rewards of the responses to each prompt."""
    for prompt_id, of_prompt in rewards.items():
        for i, reward in enumerate(of_prompt):
            messages = [{"role": "assistant", "content": f"answer {i} of version {version}"}]
            keep(
                folder, version, f"e{version}-{prompt_id}-{i}", {"messages": messages, **story}, reward=reward,
                prompt_id=prompt_id, prompt=f"question {prompt_id}", where="validation_data",
            )  # fmt: skip


def add_summary(folder: Path, **values: Any) -> None:
    """The figures of a run that has come to its end."""
    summary = {"finished": True, "steps": 6, "counters": COUNTERS, "folder": str(folder)}
    summary |= {"seconds": {"engine start": 10.0, "training": 50.0}}
    (folder / "summary.json").write_text(json.dumps(summary | values))


def finished_run(folder: Path, *, seed: int = 0, gain: float = 0.1, **sections: Mapping[str, Any]) -> Path:
    """A whole run of six steps whose reward rises by `gain` a step, evaluated at versions 0, 3 and 6."""
    run = {"seed": seed, **sections.pop("run", {})}
    make_run(folder, run=run, **sections)
    for version in range(1, 7):
        add_metrics(folder, version, "sampler", reward__mean=0.2 + gain * version, staleness__mean=1.0)
        learner = {"seconds__wait": 2.0, "seconds__train": 8.0, "tokens__model": 100.0, "tokens__total": 200.0}
        add_metrics(folder, version, "learner", **learner)
        generator = {"generator__seconds": 10.0 * version, "generator__waiting_for_tasks_seconds": 5.0 * version}
        add_metrics(folder, version, "generator-1", **generator, generator__tokens=40.0 * version)
    add_evaluation(folder, 0, {"a": [0.0, 0.0], "b": [1.0, 1.0]})
    add_evaluation(folder, 3, {"a": [1.0, 0.0], "b": [1.0, 1.0]})
    add_evaluation(folder, 6, {"a": [1.0, 1.0], "b": [0.0, 1.0]})
    add_summary(folder)
    versions = {
        "process": "sampler",
        "time": 1000.0,
        "python": "3.11.7",
        "commit": None,
        "packages": {"redis": "8.1.0"},
    }
    (folder / "versions.jsonl").write_text(json.dumps(versions) + "\n")
    return folder


def change_config(folder: Path, *, without: Sequence[str] = (), **sections: Mapping[str, Any]) -> None:
    """Give the written configuration other values, keys that this release does not know, and leave keys out."""
    values = yaml.safe_load((folder / "config.yaml").read_text())
    for name, changed in sections.items():
        values[name] = {**values.get(name, {}), **changed}
    for key in without:
        section, _, name = key.partition(".")
        del values[section][name]
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
