"""Makes the pictures of docs/gpu.md, of a run that does not exist: its figures are made up.

    python -m benchmarks.gpu_pictures

Writes docs/gpus.png, the dashboard's panel, and docs/gpus-live.png, the live view: Qwen3-8B on six H100, whose learner
trains on micro-batches that are too small for them.
"""

from __future__ import annotations

import io
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks import options
from benchmarks.screenshots import opened, photograph, scrolled
from common.errors import reports_user_errors
from common.messages import Step
from launcher.folder.metrics import read_metrics
from launcher.folder.time_budget import Split
from launcher.run.display import render
from launcher.run.progress import PhaseTimer, Progress
from tests.support.chromium import chromium
from tests.support.dashboard import Dashboard
from tests.support.run_folder import BEGAN, make_run, write_metrics

STEPS, SECONDS = 40, 30.0  # of the run, and of a step
GENERATORS = [f"generator-{number}" for number in range(1, 3)]


def write_run(folder: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Write a made-up run; returns the learner's newest step, and the newest status of each process."""
    make_run(folder, run={"steps": 300}, model={"path": "Qwen3-8B"})
    rng = np.random.default_rng(0)
    for step in range(1, STEPS + 1):
        time = BEGAN + SECONDS * step
        write_metrics(folder, step, {"reward/mean": 0.3 + 0.004 * step, "staleness/mean": 1.6}, time=time)
        trained = {
            "seconds/wait": 0.9, "seconds/train": 26.0, "seconds/publish": 1.1, "tokens/total": 265_000.0,
            "tokens/per_second_per_gpu": 2_550 + rng.normal(0, 60), "gpu/mfu": 0.128 + rng.normal(0, 0.003),
        }  # fmt: skip
        write_metrics(folder, step, trained, "learner", time)
        for part in range(6):
            at = time - SECONDS + 5 * part
            statuses = {"learner": _gpus(rng, 4, 0.91, 71.0, 590)}
            for name in GENERATORS:
                statuses[name] = _gpus(rng, 1, 0.97, 68.0, 610) | _engine(rng, step + part / 6, at - BEGAN + SECONDS)
            for name, metrics in statuses.items():
                write_metrics(folder, step, metrics, name, at)
    processes: dict[str, dict[str, Any]] = {
        name: {"role": name.split("-")[0], "metrics": metrics} for name, metrics in statuses.items()
    }
    for number, (name, process) in enumerate(processes.items()):
        process |= {"pid": 4_711 + number, "host": "node-1", "state": "running", "version": STEPS}
        if name != "learner":
            rate = process["metrics"]["generator/tokens_per_second"]
            process |= {"tokens_per_second": rate, "episodes": 64 * STEPS, "playing": 95, "concurrency": 96}
    return trained, processes


def _gpus(rng: np.random.Generator, count: int, busy: float, memory: float, watts: float) -> dict[str, float]:
    mean = min(1.0, busy + rng.normal(0, 0.02))
    return {
        "gpu/count": float(count), "gpu/utilisation": mean, "gpu/least_utilisation": mean - 0.03 * (count > 1),
        "gpu/memory_gb": memory, "gpu/memory_share": memory / 85.5, "gpu/watts": watts + rng.normal(0, 12),
        "process/memory_mb": 9_000.0,
    }  # fmt: skip


def _engine(rng: np.random.Generator, step: float, seconds: float) -> dict[str, float]:
    rate = 4_150 + rng.normal(0, 120)
    return {
        "generator/tokens_per_second": rate, "generator/tokens_per_second_per_gpu": rate, "generator/seconds": seconds,
        "generator/waiting_for_tasks_seconds": 0.01 * seconds, "generator/episodes": round(64 * step),
        "engine/batch_size": 90 + rng.normal(0, 3), "engine/cache_used": 0.74 + rng.normal(0, 0.03),
        "engine/prefix_hits": 0.38 + rng.normal(0, 0.03), "engine/preemptions": float(step // 9),
    }  # fmt: skip


def live_view(folder: Path, trained: dict[str, Any], processes: dict[str, dict[str, Any]]) -> str:
    """The frame of the live view at the end of the written run, as an SVG picture."""
    broker: Any = SimpleNamespace()  # nothing is read from Redis
    progress = Progress(broker, 300, folder=folder)
    progress.metrics = read_metrics(folder)
    progress.step = Step(version=STEPS, metrics=trained | {"staleness/mean": 1.6, "staleness/max": 3.0})
    progress.rewards.extend(0.3 + 0.004 * step for step in range(STEPS))
    progress.evaluations = [{"version": 0, "accuracy": 0.31}, {"version": 40, "accuracy": 0.44}]
    progress.counters = {"counted": 128 * STEPS, "dispatched": 128 * STEPS + 320}
    progress.processes, progress.split = processes, Split(4, 2)
    nobody: Any = SimpleNamespace(children={}, notices=SimpleNamespace(newest=[]))
    phases = PhaseTimer({"training": STEPS * SECONDS})
    phases.enter("training")
    console = Console(record=True, width=100, file=io.StringIO())
    console.print(render("runs/qwen3-8b-maths", progress, nobody, phases))
    return console.export_svg(title="spo run configs/qwen3-8b-maths.yaml")


@reports_user_errors
def main() -> None:
    parser = options.Parser(__doc__)
    parser.add_argument("-o", "--output", type=options.folder, default=Path("docs"), help="folder for the pictures")
    to = parser.parse_args().output
    with tempfile.TemporaryDirectory() as scratch:
        folder, picture = Path(scratch) / "qwen3-8b-maths", Path(scratch) / "live.svg"
        picture.write_text(live_view(folder, *write_run(folder)), encoding="utf-8")
        with Dashboard([folder]) as server, chromium() as browser:
            page = opened(browser, f"{server.url}#/charts", 1240, 1330, "light")
            photograph(scrolled(page, "gpus"), to / "gpus.png")
            page = browser.new_context(viewport={"width": 1240, "height": 640}).new_page()
            page.goto(picture.as_uri())
            photograph(page, to / "gpus-live.png")


if __name__ == "__main__":
    main()
