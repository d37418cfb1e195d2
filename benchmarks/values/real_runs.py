"""The variance that the values save in real runs: `spo quickstart` with all its processes, by baseline and visits."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.values.oracle import Sample, group_oracle
from launcher.tasks import find_task
from launcher.tasks.task import Problem, write

STEPS = 60
BATCH = 128
# What the problems of a task are grouped by; those of the others are one group.
COLUMNS = {"gym": "family", "arithmetic": "level", "code": "level"}
STATES = "sampler.tracker.prompt_states={folder}/states.npz"
BASELINES = {
    "population": ["sampler.tracker.prior=population", "sampler.tracker.group_column=null"],
    "population, by group": ["sampler.tracker.prior=population", "sampler.tracker.group_column={column}"],
    "population, states": ["sampler.tracker.prior=population", "sampler.tracker.group_column=null", STATES],
    "paper": ["sampler.tracker.prior=paper", "sampler.tracker.group_column=null"],
}


def measure(
    task: str, baselines: Iterable[str], visits: Iterable[float], seeds: Iterable[int], path: Path
) -> list[dict[str, Any]]:
    """One row a run, printed and added to the file at `path` as it ends; what the file has is not run again.

    A baseline by group is left out where the task has no groups.
    """
    options_of = baselines_of(task)
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    for seed in seeds:
        for visit in visits:
            for baseline in [name for name in baselines if name in options_of]:
                key = {"task": task, "visits": visit, "baseline": baseline, "seed": seed}
                if any(key.items() <= row.items() for row in rows):
                    continue
                row = key | _run(task, visit, baseline, seed)
                rows.append(row)
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
                print(
                    f"{task}, {visit:g} visits, seed {seed}, {baseline}: variance ratio {row['variance_ratio']:.3f}, "
                    f"an oracle of the groups {row['oracle']:.3f}, "
                    f"held-out {row['accuracy_before']:.1%} -> {row['accuracy_after']:.1%}",
                    flush=True,
                )
    return [row for row in rows if row["task"] == task]


def baselines_of(task: str, folder: str = "") -> dict[str, list[str]]:
    """The settings of each baseline that a task can have, with the inputs of a run in `folder`."""
    column = COLUMNS.get(task)
    return {
        name: [option.format(column=column, folder=folder) for option in options]
        for name, options in BASELINES.items()
        if column or not any("{column}" in option for option in options)
    }


def groups_of(task: str, problems: Iterable[Problem]) -> dict[str, str]:
    """The group of each problem, by its prompt."""
    column = COLUMNS.get(task)
    return {problem.prompt: str(problem.columns[column]) if column else "" for problem in problems}


def table(rows: Iterable[dict[str, Any]]) -> str:
    """Markdown: the variance ratio of each seed and of the oracle, by task, visits and baseline."""
    found: dict[tuple[str, float, str], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["task"], row["visits"], row["baseline"]), []).append(row)
    lines = ["| task | visits | baseline | variance ratio, by seed | oracle of the groups |", "|---|---|---|---|---|"]
    for (task, visits, baseline), same in sorted(found.items()):
        ratios = ", ".join(f"{row['variance_ratio']:.3f}" for row in same)
        oracles = ", ".join(f"{row['oracle']:.3f}" for row in same)
        lines.append(f"| {task} | {visits:g} | {baseline} | {ratios} | {oracles} |")
    return "\n".join(lines)


def _run(task: str, visits: float, baseline: str, seed: int) -> dict[str, Any]:
    """The closing figures of a quickstart from so many prompts that each is visited `visits` times."""
    problems, _ = find_task(task).split(seed, round(STEPS * BATCH / visits))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(problems, folder / "train.jsonl")
        data, own = f"data.train={folder}/train.jsonl", baselines_of(task, name)[baseline]
        if STATES in BASELINES[baseline]:
            _spo("prepare", f"{name}/inputs", "--task", task)
            _spo("values", "states", f"{name}/inputs/run.yaml", "--output", f"{name}/states.npz", "-o", data)
        options = [*own, data, "eval.every=20", "episode.rollouts_every=1"]
        _spo(
            "quickstart", "--plain", "--task", task, "--seed", str(seed), "--steps", str(STEPS), "--output", name,
            *(part for option in options for part in ("-o", option)),
        )  # fmt: skip
        (path,) = folder.glob("quickstart*/summary.json")
        summary = json.loads(path.read_text(encoding="utf-8"))
        samples = _samples(path.parent / "rollouts", groups_of(task, problems))
    figures = {key: summary[key] for key in ("variance_ratio", "accuracy_before", "accuracy_after", "counters")}
    return figures | {"oracle": group_oracle(samples), "samples": len(samples)}


def _spo(*arguments: str) -> None:
    command = [sys.executable, "-m", "launcher.cli", *arguments]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    if outcome.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{outcome.stderr[-3000:]}")


def _samples(folder: Path, groups: Mapping[str, str]) -> list[Sample]:
    """Every sample of the run: the version at its dispatch, its problem's group and its reward."""
    rows = (json.loads(line) for path in folder.glob("*.jsonl") for line in path.read_bytes().splitlines())
    return [Sample(row["version"], groups[row["input"]], row["reward"]) for row in rows if row["status"] == "ok"]
