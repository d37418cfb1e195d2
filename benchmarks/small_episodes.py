"""A task of answers of 7 tokens: samples a second, CPU time of each process, and time to reward 0.9, beside TRL's GRPO.

    python -m benchmarks.small_episodes --trl ~/trl/bin/python

The tiny model copies a number of six digits, or writes it backwards, as it mostly does at first. `spo run` and
TRL begin with the same weights, prompts, batch and learning rate, and take turns with all cores. Without `--trl` (a
Python in which TRL is installed) only SPO runs; `--beside CHECKOUT` adds another checkout of it.

On a machine that does other work too, compare CPU time a sample: that depends little on the others.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from benchmarks import options
from benchmarks.tables import table
from benchmarks.watched import Point, watch_spo, watch_trl
from common.errors import reports_user_errors

BATCH, TOKENS = 128, 8
FIRST = 5  # step at which rates begin: before it, everything warms up
GOAL = 0.9
TASK_SIZE = 2048
INITIAL = 0.15  # part of the answers that the initial model gets right
STEPS_OF_WARM_START = 200


def make_task(folder: Path) -> None:
    """The prompts, and a model that was trained for a moment on right and wrong answers."""
    if (folder / "model" / "config.json").exists():
        return
    import torch

    from launcher.quickstart.tiny_model import build_model, build_tokenizer, save
    from launcher.quickstart.warm_start import train
    from launcher.tasks.task import Choice, Problem, QuickstartTask, Recipe, Turn, write

    choice = Choice(demonstrated=0.5, initial=INITIAL)

    def problems(rng: random.Random) -> Iterator[Problem]:
        while True:
            # The first digit and the last differ, so that the first token decides.
            digits = "".join(rng.choice("123456789") for _ in range(6))
            if digits[0] != digits[-1]:
                yield Problem(f"Copy {digits}", digits)

    def demonstrate(problem: Problem, rng: random.Random) -> list[Turn]:
        right, weight = choice.draw(rng)
        return [Turn(problem.answer if right else problem.answer[::-1], weight=weight)]

    task = QuickstartTask(
        "copy", "to copy a number", problems, demonstrate, ("Copy ",), recipe=Recipe(steps=STEPS_OF_WARM_START)
    )
    torch.set_num_threads(2)
    tokenizer = build_tokenizer(task.extra_tokens)
    save(build_model(tokenizer, seed=0), tokenizer, folder / "untrained")
    train(folder / "untrained", folder / "model", task)
    write(task.split(0, TASK_SIZE, 1)[0], folder / "train.jsonl")


def config(folder: Path, run: Path, steps: int, lr: float, concurrency: int) -> dict[str, Any]:
    """The configuration of `spo run`."""
    return {
        "run": {"name": "small", "experiment": "small", "steps": steps, "output_dir": str(run)},
        "model": {"path": str(folder / "model"), "dtype": "float32", "max_model_len": 64},
        "data": {"train": str(folder / "train.jsonl"), "max_prompt_tokens": 32},
        "sampler": {"batch_size": BATCH, "max_staleness": 2},
        "generator": {"max_concurrency": concurrency},
        "learner": {"lr": lr, "dtype": "float32", "checkpoint_every": steps, "export": False},
        "episode": {"max_response_tokens": TOKENS, "reward": "exact", "rollouts_every": 0},
        "eval": {"every": 0},
    }


def run_spo(folder: Path, checkout: Path, steps: int, lr: float, concurrency: int, overrides: list[str]) -> list[Point]:
    """A whole run of a checkout, watched from outside."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "config.yaml"
        path.write_text(yaml.safe_dump(config(folder, Path(name), steps, lr, concurrency)))
        return watch_spo(path, Path(name) / "small" / "metrics.jsonl", checkout, overrides, every=0.1)


def run_trl(folder: Path, python: Path, steps: int, lr: float) -> list[Point]:
    """The same task by TRL."""
    with tempfile.TemporaryDirectory() as name:
        grpo = {
            "output_dir": name,
            "per_device_train_batch_size": BATCH,
            "num_generations": 8,
            "max_completion_length": TOKENS,
            "max_steps": steps,
            "learning_rate": lr,
            "lr_scheduler_type": "constant",
            "beta": 0.0,
            "temperature": 1.0,
            "save_strategy": "no",
            "bf16": False,
            "gradient_checkpointing": False,
        }
        settings = {
            "model": str(folder / "model"), "dtype": "float32", "rows": str(folder / "train.jsonl"),
            "system_prompt": None, "pattern": None, "threads": 2, "grpo": grpo,
        }  # fmt: skip
        return watch_trl(python, settings, Path(name))


def figures(points: list[Point]) -> dict[str, float]:
    """Samples a second, CPU milliseconds a sample by process, and steps and seconds to the goal."""
    first, last = points[FIRST], points[-1]
    seconds, samples = last.time - first.time, BATCH * (len(points) - 1 - FIRST)
    cpu = {f"CPU a sample, {name or 'other'}, ms": 1000 * (used - first.cpu.get(name, 0.0)) / samples
           for name, used in sorted(last.cpu.items())}  # fmt: skip
    reached = next((number for number, point in enumerate(points, 1) if point.reward >= GOAL), 0)
    return {
        "samples/s": samples / seconds,
        "CPU a sample, all, ms": sum(cpu.values()),
        **cpu,
        f"steps to reward {GOAL}": float(reached),
        # The first step of both sides is slow for reasons of its own: it counts as long as the others.
        f"seconds to reward {GOAL}": reached * seconds * BATCH / samples,
        "last reward": last.reward,
    }


@reports_user_errors
def main() -> None:
    parser = options.Parser(__doc__)
    parser.add_argument("--trl", type=options.file, help="a Python in which TRL is installed")
    parser.add_argument("--beside", type=options.checkout, help="another checkout, measured in turns with this one")
    parser.add_argument("--folder", type=Path, help="keeps task and model for the next time")
    parser.add_argument("--steps", type=options.at_least(FIRST + 2), default=70)
    parser.add_argument("--lr", type=options.above_zero, default=1e-4)
    parser.add_argument("--concurrency", type=options.positive, default=256)
    parser.add_argument("--turns", type=options.positive, default=1)
    parser.add_argument("-o", "--override", action="append", default=[], help="of the configuration of `spo run`")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        make_task(folder)
        columns: dict[str, list[dict[str, float]]] = {}
        for _ in range(args.turns):
            sides = {"this": options.ROOT} | ({"beside": args.beside} if args.beside else {})
            for name, checkout in sides.items():
                points = run_spo(folder, checkout, args.steps, args.lr, args.concurrency, args.override)
                columns.setdefault(name, []).append(figures(points))
            if args.trl:
                columns.setdefault("TRL", []).append(figures(run_trl(folder, args.trl, args.steps, args.lr)))
    rows = list(dict.fromkeys(row for column in columns.values() for row in column[0]))
    lines = [
        [row, *(f"{median(turn[row] for turn in turns):,.2f}" if row in turns[0] else "" for turns in columns.values())]
        for row in rows
    ]
    print(table(["", *columns], lines))


if __name__ == "__main__":
    main()
