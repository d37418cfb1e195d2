"""What a teacher saves: samples to 50% held-out accuracy, and the accuracy of the run and at its end, by arm and seed.

    python -m benchmarks.teacher                       # five seeds of every arm, on the gym's tiny model
    python -m benchmarks.teacher table                 # of the rows that the results file has

The arms, each a whole `spo run` on the same problems: `reward` alone; `teacher` alone, and `teacher + reward`: the
reverse KL of the sampled tokens as advantage; `top k`: of the teacher's 8 likeliest tokens as loss; `self`: the policy
itself, told the answer. The teacher is the export of a run on the reward alone that went on for longer, by a seed of
its own. Each row is written as its run ends; what the file has is not run again, and a run that was cut short goes on.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import options
from common.config import load_config
from common.errors import reports_user_errors
from launcher.folder.metrics import FILE

RESULTS = Path(__file__).parent / "results" / "teacher.jsonl"
TASK = "gym"
TEACHER_SEED, TEACHER_STEPS = 1000, 120
STEPS, EVERY = 40, 2
GOAL = 0.5  # a run on the reward alone ends between 54 and 60%
CONTEXT = "The answer is {answer}."
# The settings of each arm; `{teacher}` is the teacher's folder.
ARMS: dict[str, list[str]] = {
    "reward": [],
    "teacher": ["teacher.model={teacher}", "teacher.reward=false"],
    "teacher + reward": ["teacher.model={teacher}"],
    "top k": ["teacher.model={teacher}", "teacher.reward=false", "teacher.form=loss", "teacher.top_k=8"],
    "self": [f"teacher.context={CONTEXT}", "teacher.reward=false"],
}
Curve = list[tuple[int, float]]  # samples, and held-out accuracy after them


def measure(arms: Iterable[str], seeds: Iterable[int], steps: int, folder: Path, path: Path) -> list[dict[str, Any]]:
    """The rows of the file at `path`, with those of these arms and seeds that it lacked.

    Args:
        folder: for inputs, the teacher and the runs.
    """
    rows = read(path)
    for seed in seeds:
        for arm in arms:
            key: dict[str, Any] = {"arm": arm, "seed": seed, "steps": steps}
            if any(key.items() <= row.items() for row in rows):
                continue
            row = key | _run(arm, seed, steps, folder)
            rows.append(row)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(f"seed {seed}, {arm}: {_shown(samples_to(row['curve'], GOAL))} samples to {GOAL:.0%}", flush=True)
    return rows


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of earlier calls."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def samples_to(curve: Sequence[Sequence[float]], goal: float) -> float | None:
    """Samples after which the held-out accuracy first reaches the goal, in proportion between evaluations."""
    before: Sequence[float] | None = None
    for samples, accuracy in curve:
        if accuracy >= goal:
            if before is None:
                return float(samples)
            return before[0] + (samples - before[0]) * (goal - before[1]) / (accuracy - before[1])
        before = samples, accuracy
    return None


def accuracy_of(curve: Sequence[Sequence[float]]) -> float:
    """The mean of its evaluations."""
    return float(np.mean([accuracy for _, accuracy in curve]))


def curve_of(metrics: Iterable[str], batch: int) -> Curve:
    """Samples and accuracy of each evaluation, from the lines of a run's metrics."""
    accuracy = {}
    for line in metrics:
        entry = json.loads(line)
        if (value := entry["values"].get("validation/accuracy")) is not None:
            accuracy[entry["version"]] = value
    return [(version * batch, accuracy[version]) for version in sorted(accuracy)]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: by arm samples to the goal and final accuracy by seed, and means ± twice their error.

    The mean of the curve is that of all evaluations of a run, the accuracy at the end that of the last three.
    """
    goal = f"samples to {GOAL:.0%}, by seed"
    lines = [
        f"| arm | steps | {goal} | mean | mean of the curve | accuracy at the end, by seed | mean |",
        "|---|---|---|---|---|---|---|",
    ]
    order = list(ARMS)
    kinds = sorted({(row["arm"], row["steps"]) for row in rows}, key=lambda kind: (order.index(kind[0]), kind[1]))
    for arm, steps in kinds:
        same = sorted((row for row in rows if (row["arm"], row["steps"]) == (arm, steps)), key=lambda row: row["seed"])
        samples = [samples_to(row["curve"], GOAL) for row in same]
        reached = [value for value in samples if value is not None]
        mean = band(reached, 0) if len(reached) == len(samples) else f"{len(reached)} of {len(samples)} reach it"
        ends = [100 * accuracy_of(row["curve"][-3:]) for row in same]
        whole = band([100 * accuracy_of(row["curve"]) for row in same], 1)
        by_seed = ", ".join(map(_shown, samples)), ", ".join(f"{end:.1f}" for end in ends)
        lines.append(f"| {arm} | {steps} | {by_seed[0]} | {mean} | {whole} | {by_seed[1]} | {band(ends, 1)} |")
    return "\n".join(lines)


def band(values: Sequence[float], digits: int) -> str:
    """The mean ± twice its standard error, which one value does not have."""
    error = 2 * float(np.std(values, ddof=1)) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return f"{np.mean(values):,.{digits}f} ± {error:,.{digits}f}"


def arm_options(arm: str, teacher: Path) -> list[str]:
    """The settings in which an arm differs from a run on the reward alone."""
    return [option.replace("{teacher}", str(teacher)) for option in ARMS[arm]]


def _shown(samples: float | None) -> str:
    return "never" if samples is None else f"{samples:,.0f}"


def _run(arm: str, seed: int, steps: int, folder: Path) -> dict[str, Any]:
    """One run of an arm, on the problems of its seed."""
    began = time.monotonic()
    teacher = folder
    if any("{teacher}" in option for option in ARMS[arm]):
        run = _train("teacher", TEACHER_SEED, TEACHER_STEPS, folder, [])
        teacher = run / "checkpoints" / f"step_{TEACHER_STEPS}" / "hf"
    name = f"{arm.replace(' + ', '-').replace(' ', '-')}-{seed}"
    run = _train(name, seed, steps, folder, arm_options(arm, teacher))
    with (run / FILE).open(encoding="utf-8") as lines:
        curve = curve_of(lines, load_config(run / "config.yaml").sampler.batch_size)
    if not curve:
        sys.exit(f"{run} has no evaluation; see its logs")
    return {"curve": curve, "seconds": round(time.monotonic() - began)}


def _train(name: str, seed: int, steps: int, folder: Path, settings: Sequence[str]) -> Path:
    """The run folder of a finished run, which is made or continued if it is not there."""
    inputs, run = folder / f"inputs-{seed}", folder / "runs" / name
    if not (inputs / "run.yaml").exists():
        _spo("prepare", str(inputs), "--task", TASK, "--seed", str(seed))
    if (run / "checkpoints" / f"step_{steps}" / "hf").is_dir() and (run / "summary.json").exists():
        return run
    own = [
        f"run.name={name}",
        f"run.experiment={name}",
        f"run.output_dir={folder / 'runs'}",
        f"run.seed={seed}",
        f"run.steps={steps}",
        f"eval.every={EVERY}",
        *settings,
    ]
    _spo("run", str(inputs / "run.yaml"), "--plain", *(part for option in own for part in ("-o", option)))
    return run


def _spo(*arguments: str) -> None:
    """Run a command of SPO, which ends this one if it fails."""
    command = [sys.executable, "-m", "launcher.cli", *arguments]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    if outcome.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{outcome.stderr[-3000:]}")


@reports_user_errors
def main() -> None:
    parser = options.Parser(__doc__)
    parser.add_argument("what", nargs="?", choices=["study", "table"], default="study")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--seeds", nargs="+", type=options.at_least(0), default=list(range(5)))
    parser.add_argument("--steps", type=options.positive, default=STEPS, help=f"of every arm ({STEPS})")
    parser.add_argument(
        "--folder", type=Path, default=Path(".cache/teacher"), help="for inputs, teacher and runs (.cache/teacher)"
    )
    parser.add_argument("--results", type=options.new_file, default=RESULTS, help="file of all rows")
    args = parser.parse_args()
    if args.what == "study":
        measure(args.arms, args.seeds, args.steps, args.folder.absolute(), args.results)
    print(table(read(args.results)))


if __name__ == "__main__":
    main()
