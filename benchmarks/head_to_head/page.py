"""The table and the picture of a study, from its rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import tables
from benchmarks.head_to_head.runs import BARE, BY_TOKEN, START, TRL
from benchmarks.tables import twice_error

NAMES = {
    "spo": "SPO",
    "no baseline": "no baseline",
    "grpo": "GRPO",
    "rloo": "RLOO",
    TRL: "TRL's GRPO",
    BY_TOKEN: "SPO, normalised over tokens",
}
ORDER = [*NAMES]
GENERATORS = ("generator", "engine")  # of a run's processes, vLLM's own among them
Row = dict[str, Any]


def accuracy(row: Row, step: int | str) -> float:
    """Share of right answers at a checkpoint, the mean over held-out prompts."""
    right = row["heldout"][str(step)]
    return sum(right.values()) / (len(right) * row["settings"]["samples"])


def curve(row: Row, start: float) -> np.ndarray:
    """(step, wall seconds, CPU seconds, accuracy) at each checkpoint and before training [C, 4].

    Args:
        start: accuracy of the initial model.
    """
    seconds = [step["time"] for step in row["steps"]]
    cpu = [sum(step["cpu"].values()) for step in row["steps"]]
    points = [
        (int(step), seconds[int(step) - 1], cpu[int(step) - 1] - cpu[0], accuracy(row, step)) for step in row["heldout"]
    ]
    return np.array([(0, 0.0, 0.0, start), *points])


def seconds_to(goal: float, points: np.ndarray, column: int = 1) -> float:
    """When a curve first reaches an accuracy, between two checkpoints in proportion; NaN if it does not.

    Args:
        column: 0 for steps, 1 for wall seconds, 2 for CPU seconds.
    """
    for (*_, before), (*_, after), low, high in zip(
        points, points[1:], points[:-1, column], points[1:, column], strict=False
    ):
        if after >= goal:
            return float(low + (high - low) * max(0.0, goal - before) / max(after - before, 1e-9))
    return float("nan")


def table(rows: Sequence[Row]) -> str:
    """Markdown: for each arm its accuracy at each checkpoint and its times, then by how many points SPO leads it."""
    start = _start(rows)
    by_arm = {arm: of_arm for arm in ORDER if (of_arm := {row["seed"]: row for row in rows if row["arm"] == arm})}
    trained = next(iter(by_arm.values()), {})
    checkpoints = [*next(iter(trained.values()))["heldout"]] if trained else []
    heads = ["arm", *(f"step {step}" for step in checkpoints), "final accuracy by seed", "mean of the curve",
             "wall s a step", "CPU s a step", "samples without a signal", "variance that the baseline leaves",
             "tokens an answer", "time to TRL's final accuracy / TRL's time"]  # fmt: skip
    lines: list[list[str]] = []
    for arm, of_arm in by_arm.items():
        curves = {seed: 100 * curve(row, start)[:, 3] for seed, row in of_arm.items()}
        wall, cpu, no_signal, tokens = np.mean([_per_step(row) for row in of_arm.values()], 0)
        left = [ratio for row in of_arm.values() if (ratio := row["steps"][-1].get("variance_ratio")) is not None]
        share = []
        for seed in sorted(set(of_arm) & set(by_arm.get(TRL, {}))):
            goal = curve(by_arm[TRL][seed], start)
            share.append(seconds_to(goal[-1, 3], curve(of_arm[seed], start)) / goal[-1, 1])
        cells = [
            NAMES[arm], *(f"{percent:.1f}%" for percent in np.mean([*curves.values()], 0)[1:]),
            f"{_each([points[-1] for points in curves.values()])}%", f"{np.mean([*curves.values()]):.1f}%",
            f"{wall:.1f}", f"{cpu:.1f}", f"{no_signal:.0%}", _mean(left), f"{tokens:.1f}", _mean(share),
        ]  # fmt: skip
        lines.append(cells)
    for arm, of_arm in by_arm.items():
        both = sorted(set(of_arm) & set(by_arm.get("spo", {})))
        if arm != "spo" and both:
            pairs = [(by_arm["spo"][seed], of_arm[seed]) for seed in both]
            cells = [lead(pairs, step) for step in checkpoints]
            ends = [100 * (accuracy(spo, checkpoints[-1]) - accuracy(other, checkpoints[-1])) for spo, other in pairs]
            empty = [""] * (len(heads) - len(cells) - 2)
            lines.append([f"SPO minus {NAMES[arm]}", *cells, _each(ends), *empty])
    return f"before training: {start:.1%}\n\n{tables.table(heads, lines)}"


def lead(pairs: Sequence[tuple[Row, Row]], step: str) -> str:
    """By how many points the first of each pair is ahead: the mean over pairs and held-out prompts.

    Twice its standard error follows: over the prompts, each with its mean over the pairs; in brackets over the pairs.
    """
    samples = pairs[0][0]["settings"]["samples"]
    points = 100 / samples * np.array(
        [[ours["heldout"][step][name] - theirs["heldout"][step][name] for name in ours["heldout"][step]]
         for ours, theirs in pairs]
    )  # fmt: skip
    over_pairs = f" ({twice_error(points.mean(1)):.1f})" if len(pairs) > 1 else ""
    return f"{points.mean():.1f} ± {twice_error(points.mean(0)):.1f}{over_pairs}"


def _each(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.1f}" for value in values)


def _mean(values: Sequence[float]) -> str:
    return f"{np.mean(values):.2f}" if values else ""


def passes(rows: Sequence[Row]) -> str:
    """Markdown: CPU seconds a sample of SPO's learner and generators, of the passes by themselves, and of TRL."""

    def used(arm: str, *roles: str) -> float:
        """The mean over the seeds; of all processes without `roles`."""
        of_seeds = []
        for row in (row for row in rows if row["arm"] == arm):
            first, last = row["steps"][0]["cpu"], row["steps"][-1]["cpu"]
            seconds = sum(last.get(role, 0.0) - first.get(role, 0.0) for role in roles or last)
            of_seeds.append(seconds / (len(row["steps"]) - 1) / row["settings"]["batch"])
        return float(np.mean(of_seeds))

    def tokens(arm: str) -> float:
        return float(np.mean([_per_step(row)[3] for row in rows if row["arm"] == arm]))

    arms = {row["arm"] for row in rows}
    heads = ["CPU seconds a sample", "learner", "generators", "all processes", "tokens an answer"]
    lines: list[list[str]] = []
    if "spo" in arms:
        cells = [f"{seconds:.2f}" for seconds in (used("spo", "learner"), used("spo", *GENERATORS), used("spo"))]
        lines.append([NAMES["spo"], *cells, f"{tokens('spo'):.1f}"])
    for alone in (row["bare"] for row in rows if row["arm"] == BARE):
        passes_alone = [alone["deepspeed"], alone["vllm"], alone["deepspeed"] + alone["vllm"]]
        cells = [f"{seconds:.2f}" for seconds in passes_alone]
        lines.append(["DeepSpeed and vLLM alone", *cells, f"{alone['tokens']:.1f}"])
    if TRL in arms:
        lines.append([NAMES[TRL], "", "", f"{used(TRL):.2f}", f"{tokens(TRL):.1f}"])
    return tables.table(heads, lines)


def plot(rows: Sequence[Row], target: Path) -> None:
    """Held-out accuracy against samples, CPU seconds and wall seconds: the mean of the seeds, and twice its error."""
    # Matplotlib takes a second to import.
    from benchmarks import plots

    start, batch = _start(rows), rows[0]["settings"]["batch"]
    axes_of: list[tuple[str, Callable[[np.ndarray], np.ndarray]]] = [
        ("samples", lambda points: points[:, 0] * batch),
        ("CPU seconds", lambda points: points[:, 2]),
        ("wall seconds", lambda points: points[:, 1]),
    ]
    figure, (panels,) = plots.panels(1, 3, 3.7, 3.4, dpi=150)
    for axes, (name, of) in zip(panels, axes_of, strict=True):
        for number, arm in enumerate(ORDER):
            curves = [curve(row, start) for row in rows if row["arm"] == arm]
            if not curves:
                continue
            x = np.mean([of(points) for points in curves], 0)
            heights = [points[:, 3] for points in curves]
            plots.curve(axes, x, heights, f"C{number}", NAMES[arm], marker="o", markersize=3)
        axes.set_xlabel(name)
    panels[0].set_ylabel("held-out accuracy")
    panels[0].legend(frameon=False, fontsize="small")
    plots.save(figure, target)


def _start(rows: Sequence[Row]) -> float:
    return next((accuracy(row, 0) for row in rows if row["arm"] == START), float("nan"))


def _per_step(row: Row) -> tuple[float, float, float, float]:
    """Wall and CPU seconds of a step, share of samples without a signal, tokens of an answer."""
    steps = row["steps"]
    after = len(steps) - 1
    cpu = [sum(step["cpu"].values()) for step in steps]
    return (
        (steps[-1]["time"] - steps[0]["time"]) / after,
        (cpu[-1] - cpu[0]) / after,
        float(np.mean([step["no_signal"] for step in steps])),
        float(np.mean([step["tokens"] for step in steps])),
    )
