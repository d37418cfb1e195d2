"""The table and the picture of a study, from its rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.head_to_head.runs import ARMS, BARE, START, TRL

ORDER = [*ARMS, TRL]
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
    """Markdown: for each arm the accuracy at the end, times, samples without a signal, and what SPO leads by."""
    start = _start(rows)
    lines = [f"accuracy before training: {start:.1%}", ""]
    heads = ["arm", "seeds", "accuracy at the end", "mean of the curve", "SPO leads by (paired)", "wall s a step",
             "CPU s a step", "no signal", "variance left", "tokens an answer",
             "wall to TRL's end, of TRL's"]  # fmt: skip
    lines += [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    by_arm = {arm: {row["seed"]: row for row in rows if row["arm"] == arm} for arm in ORDER}
    spo, trl = by_arm["spo"], by_arm[TRL]
    for arm, of_arm in by_arm.items():
        if not of_arm:
            continue
        curves = {seed: curve(row, start) for seed, row in of_arm.items()}
        both = sorted(set(of_arm) & set(spo))
        ends = {seed: points[-1, 3] for seed, points in curves.items()}
        lead = [100 * (curve(spo[seed], start)[-1, 3] - ends[seed]) for seed in both]
        share = []
        for seed in sorted(set(of_arm) & set(trl)):
            goal = curve(trl[seed], start)
            share.append(seconds_to(goal[-1, 3], curves[seed]) / goal[-1, 1])
        steps = [_per_step(row) for row in of_arm.values()]
        cells = [
            arm, str(len(of_arm)), band([100 * end for end in ends.values()], "%"),
            band([100 * float(np.mean(points[:, 3])) for points in curves.values()], "%"),
            "" if arm == "spo" else band(lead, " points"),
            *(band([step[i] for step in steps]) for i in range(2)), band([100 * step[2] for step in steps], "%"),
            band([ratio for row in of_arm.values() if (ratio := row["steps"][-1].get("variance_ratio")) is not None]),
            band([step[3] for step in steps]), band(share),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def passes(rows: Sequence[Row]) -> str:
    """Markdown: CPU seconds a sample of SPO's learner and generators, of the passes by themselves, and of TRL."""

    def used(arm: str, *roles: str) -> list[float]:
        """By seed; of all processes without `roles`."""
        of_seeds = []
        for row in (row for row in rows if row["arm"] == arm):
            first, last = row["steps"][0]["cpu"], row["steps"][-1]["cpu"]
            seconds = sum(last.get(role, 0.0) - first.get(role, 0.0) for role in roles or last)
            of_seeds.append(seconds / (len(row["steps"]) - 1) / row["settings"]["batch"])
        return of_seeds

    alone = next((row["bare"] for row in rows if row["arm"] == BARE), None)
    lines = [
        "| CPU seconds a sample | learner | generators | all processes | tokens an answer |",
        "|---|---|---|---|---|",
    ]
    cells = [
        band(used("spo", "learner")),
        band(used("spo", *GENERATORS)),
        band(used("spo")),
        band(_answers(rows, "spo")),
    ]
    lines.append(f"| spo | {' | '.join(cells)} |")
    if alone:
        both = alone["deepspeed"] + alone["vllm"]
        cells = [f"{number:.2f}" for number in (alone["deepspeed"], alone["vllm"], both, alone["tokens"])]
        lines.append(f"| DeepSpeed and vLLM alone | {' | '.join(cells)} |")
    return "\n".join([*lines, f"| {TRL} | | | {band(used(TRL))} | {band(_answers(rows, TRL))} |"])


def band(values: Sequence[float], unit: str = "") -> str:
    """The mean and twice its standard error, of which one value has none; empty without values."""
    if not values:
        return ""
    if len(values) == 1:
        return f"{values[0]:.2f}{unit}"
    error = 2 * float(np.std(values, ddof=1)) / len(values) ** 0.5
    return f"{np.mean(values):.2f} ± {error:.2f}{unit}"


def plot(rows: Sequence[Row], target: Path) -> None:
    """Held-out accuracy against samples, CPU seconds and wall seconds: the mean of the seeds, and twice its error."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    start, batch = _start(rows), rows[0]["settings"]["batch"]
    axes_of: list[tuple[str, Callable[[np.ndarray], np.ndarray]]] = [
        ("samples", lambda points: points[:, 0] * batch),
        ("CPU seconds", lambda points: points[:, 2]),
        ("wall seconds", lambda points: points[:, 1]),
    ]
    figure, panels = pyplot.subplots(1, 3, figsize=(11, 3.4), dpi=150, sharey=True)
    for axes, (name, of) in zip(panels, axes_of, strict=True):
        for number, arm in enumerate(ORDER):
            curves = [curve(row, start) for row in rows if row["arm"] == arm]
            if not curves:
                continue
            x = np.mean([of(points) for points in curves], 0)
            heights = np.array([points[:, 3] for points in curves])
            middle, error = heights.mean(0), 2 * heights.std(0, ddof=min(1, len(curves) - 1)) / len(curves) ** 0.5
            axes.plot(x, middle, marker="o", markersize=3, color=f"C{number}", label=arm)
            axes.fill_between(x, middle - error, middle + error, color=f"C{number}", alpha=0.15, linewidth=0)
        axes.set_xlabel(name)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("held-out accuracy")
    panels[0].legend(frameon=False, fontsize="small")
    figure.tight_layout()
    figure.savefig(target)
    pyplot.close(figure)


def _start(rows: Sequence[Row]) -> float:
    return next((accuracy(row, 0) for row in rows if row["arm"] == START), float("nan"))


def _answers(rows: Sequence[Row], arm: str) -> list[float]:
    return [_per_step(row)[3] for row in rows if row["arm"] == arm]


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
