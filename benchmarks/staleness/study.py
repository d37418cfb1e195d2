"""The study's jobs, and running those that are not in the results file yet."""

from __future__ import annotations

import functools
import multiprocessing
import os
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.staleness import results
from benchmarks.staleness.results import Job
from benchmarks.staleness.variants import VARIANTS, steps_at
from launcher.quickstart.cache import cached_model
from launcher.tasks.arithmetic import TASK


def jobs(variants_by_age: Mapping[int, Iterable[str]], seeds: Iterable[int], regime: Iterable[str]) -> list[Job]:
    """Every job, of variants by staleness; seed by seed, so that an unfinished study compares like with like."""
    return [
        Job(variant, age, seed, (f"run.steps={steps_at(age)}", *regime, *VARIANTS[variant]))
        for seed in seeds
        for age, variants in variants_by_age.items()
        for variant in variants
    ]


@functools.lru_cache(maxsize=1)
def initial_answers(model: str, seed: int, settings: tuple[str, ...]) -> dict[int, Any]:
    """What the initial weights answered in runs with these settings, to which `Simulation` adds."""
    return {}


def run(job: Job, model: str) -> dict[str, Any]:
    """Do one job in this process, on one core."""
    import torch

    from benchmarks.staleness.simulation import Simulation
    from common.config import load_config
    from common.log import setup
    from learner.ranks.world import start

    torch.set_num_threads(1)
    setup("study")
    config = load_config(TASK.template, [f"model.path={model}", f"run.seed={job.seed}", *job.overrides])
    # Neither the algorithm nor the number of steps changes what they answer.
    settings = tuple(one for one in job.overrides if not one.startswith(("algorithm.", "run.steps=")))
    initial = initial_answers(model, job.seed, settings)
    with closing(Simulation(config, start(), job.staleness, initial=initial)) as simulation:
        return simulation.run()


def run_all(jobs: list[Job], path: Path, at_once: int) -> None:
    """Do the jobs that the results file lacks, each in a process of one thread; prints a line a job."""
    done = results.read(path)
    missing = [job for job in jobs if job.key not in done]
    print(f"{len(jobs)} jobs, {len(missing)} of them to do", flush=True)
    if not missing:
        return
    model = str(cached_model(TASK))
    # The learner warns of each step that is skipped for lack of tokens; here they are counted.
    os.environ |= {"OMP_NUM_THREADS": "1", "SPO_LOG_LEVEL": "ERROR"}
    began = time.perf_counter()
    with ProcessPoolExecutor(at_once, multiprocessing.get_context("spawn")) as pool:
        under_way = {pool.submit(run, job, model): job for job in missing}
        for number, future in enumerate(as_completed(under_way), 1):
            job, result = under_way[future], future.result()
            results.append(path, job, result)
            curve = " ".join(f"{accuracy:.2f}" for _, accuracy in result["accuracy"])
            passed = time.perf_counter() - began
            print(f"[{number}/{len(missing)}, {passed:.0f} s] staleness {job.staleness}, seed {job.seed}, ", end="")
            print(f"{job.variant}: {curve}", flush=True)


def by_variant(jobs: list[Job], path: Path) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """What the results file holds of the jobs, by variant and staleness."""
    done = results.read(path)
    rows: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for job in jobs:
        if job.key in done:
            rows.setdefault((job.variant, job.staleness), []).append(done[job.key])
    return rows
