"""The study's jobs: methods by visits and seeds, run side by side, and their results as JSON lines and a table."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import time
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from launcher.quickstart.cache import cached_model
from launcher.tasks import find_task

# Over the task's own configuration: on-policy, so that nothing but the method differs.
REGIME = ["sampler.drift.mode=constant", "learner.schedule=constant"]
SPO = ["algorithm.method=spo", "sampler.tracker.prior=population", "sampler.tracker.group_column=null"]
METHODS: dict[str, list[str]] = {
    "spo": SPO,
    "spo, by family": [*SPO, "sampler.tracker.group_column=family"],
    "spo, paper's prior": [*SPO, "sampler.tracker.prior=paper"],
    "no baseline": ["algorithm.method=none"],
    "grpo, groups of 8": ["algorithm.method=grpo", "algorithm.group_size=8"],
    "rloo, groups of 8": ["algorithm.method=rloo", "algorithm.group_size=8"],
    "critic": [*SPO, "algorithm.baseline=critic"],
    "tracker and critic": [*SPO, "algorithm.baseline=both"],
}
CRITICS = ("critic", "tracker and critic")  # left out where no method is named
SINGLE_STREAM = ("spo", "spo, paper's prior")  # the methods that offline values change
FAMILIES = "spo, by family"  # of tasks that have families


BATCH = 128


@dataclass(frozen=True, slots=True)
class StudyRun:
    """One training run."""

    task: str
    method: str
    visits: float
    offline: int
    seed: int
    steps: int
    batch: int = BATCH


def jobs(
    tasks: Iterable[str],
    visits: Iterable[float],
    offline: Iterable[int],
    seeds: Iterable[int],
    steps: int,
    methods: Iterable[str] | None = None,
    batch: int = BATCH,
) -> list[StudyRun]:
    """Every job; seed by seed, so that an unfinished study compares like with like."""
    tasks, visits, offline = list(tasks), list(visits), list(offline)
    methods = [method for method in METHODS if method not in CRITICS] if methods is None else list(methods)
    return [
        StudyRun(task, method, visit, scores, seed, steps, batch)
        for seed in seeds
        for task in tasks
        for visit in visits
        for scores in offline
        for method in methods
        if (not scores or method in SINGLE_STREAM) and (method != FAMILIES or task == "gym")
    ]


def run(job: StudyRun, model: str) -> dict[str, Any]:
    """Do one job in this process, on one core."""
    import torch

    from benchmarks.values.simulation import MethodSimulation
    from common.config import load_config
    from common.log import setup
    from learner.ranks.world import start

    torch.set_num_threads(1)
    setup("study")
    task = find_task(job.task)
    own = [f"model.path={model}", f"run.seed={job.seed}", f"run.steps={job.steps}", f"sampler.batch_size={job.batch}"]
    own += [f"eval.every={max(5, job.steps // 8)}", *REGIME, *METHODS[job.method]]
    with closing(
        MethodSimulation(load_config(task.template, own), start(), task, job.visits, job.offline)
    ) as simulation:
        return simulation.run()


def read(path: Path) -> dict[StudyRun, dict[str, Any]]:
    """What the results file holds; {} where there is none yet."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {StudyRun(**row.pop("job")): row for row in map(json.loads, lines)}


def run_all(wanted: list[StudyRun], path: Path, at_once: int) -> None:
    """Do the jobs that the results file lacks, each in a process of one thread; prints a line a job."""
    done = read(path)
    missing = [job for job in wanted if job not in done]
    print(f"{len(wanted)} jobs, {len(missing)} of them to do", flush=True)
    models = {name: str(cached_model(find_task(name))) for name in {job.task for job in missing}}
    os.environ |= {"OMP_NUM_THREADS": "1", "SPO_LOG_LEVEL": "ERROR"}
    path.parent.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    with ProcessPoolExecutor(at_once, multiprocessing.get_context("spawn")) as pool:
        under_way = {pool.submit(run, job, models[job.task]): job for job in missing}
        for number, future in enumerate(as_completed(under_way), 1):
            job, result = under_way[future], future.result()
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"job": asdict(job)} | _short(result), separators=(",", ":")) + "\n")
            print(f"[{number}/{len(missing)}, {time.perf_counter() - began:.0f} s] {_line(job, result)}", flush=True)


def table(results: dict[StudyRun, dict[str, Any]]) -> str:
    """Markdown: accuracy at the end, over the run and at equal time, variance ratio, samples without a signal.

    Each is the mean of the seeds and, after ±, twice its standard error; differences are paired by seed. Equal time is
    that of the method that is done first, offline values included; seconds are of training, offline values left out.
    """
    by_kind: dict[tuple[Any, ...], dict[str, dict[int, dict[str, Any]]]] = defaultdict(lambda: defaultdict(dict))
    ends: dict[tuple[Any, ...], float] = defaultdict(lambda: math.inf)
    for job, result in results.items():
        case = job.task, job.batch, job.steps, job.visits
        by_kind[*case, job.offline][job.method][job.seed] = result
        end = result["training_seconds"][-1] + result["offline_seconds"]
        ends[*case, job.seed] = min(ends[*case, job.seed], end)
    heads = ["task", "batch", "visits", "offline scores", "method", "accuracy at the end", "mean of the curve",
             "less that of spo", "at equal time", "variance ratio", "no signal", "seconds", "seeds"]  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for kind, by_method in sorted(by_kind.items()):
        task, batch, _, visits, offline = kind
        for method in (name for name in METHODS if name in by_method):
            found, spo = by_method[method], by_method.get("spo", {})
            cells = [
                _band([result["accuracy"][-1][1] for result in found.values()]),
                _band([_mean(result) for result in found.values()]),
                _band([_mean(found[seed]) - _mean(spo[seed]) for seed in found if seed in spo and method != "spo"]),
                _band([_accuracy_at(ends[*kind[:-1], seed], result) for seed, result in found.items()]),
                _band([result["variance_ratio"] for result in found.values()]),
                _band([result["without_signal"] for result in found.values()]),
                f"{np.mean([result['training_seconds'][-1] for result in found.values()]):.0f}",
                str(len(found)),
            ]
            lines.append(f"| {task} | {batch} | {visits:g} | {offline} | {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _mean(result: dict[str, Any]) -> float:
    """Accuracy over the run: the mean of its evaluations."""
    return float(np.mean([accuracy for _, accuracy in result["accuracy"]]))


def _accuracy_at(seconds: float, result: dict[str, Any]) -> float:
    """Held-out accuracy so many seconds after the start, between two evaluations in proportion."""
    times = np.array(result["training_seconds"]) + result["offline_seconds"]
    return float(np.interp(seconds, times, [accuracy for _, accuracy in result["accuracy"]]))


def _band(found: list[float | None]) -> str:
    values = [value for value in found if value is not None]
    if not values:
        return "–"
    error = 2 * float(np.std(values, ddof=1)) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return f"{np.mean(values):.3f} ± {error:.3f}"


def _line(job: StudyRun, result: dict[str, Any]) -> str:
    curve = " ".join(f"{accuracy:.2f}" for _, accuracy in result["accuracy"])
    silent = "" if result["without_signal"] is None else f", no signal {result['without_signal']:.2f}"
    return (
        f"{job.task}, {job.visits:g} visits, {job.offline} offline, seed {job.seed}, {job.method}: {curve}; "
        f"variance {result['variance_ratio']:.3f}{silent}"
    )


def _short(value: Any) -> Any:
    """Floats with five digits."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {name: _short(item) for name, item in value.items()}
    return [_short(item) for item in value] if isinstance(value, list | tuple) else value
