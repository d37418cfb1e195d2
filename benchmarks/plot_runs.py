"""Plots reward and held-out accuracy of finished runs. `python -m benchmarks.plot_runs RUN_FOLDER... -o FILE.png`."""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def scalars(folder: Path, tag: str) -> tuple[list[int], list[float]]:
    """Steps and values of one tag of a run's sampler."""
    events = EventAccumulator(str(folder / "tensorboard" / "sampler"))
    events.Reload()
    found = events.Scalars(tag)
    return [event.step for event in found], [event.value for event in found]


def plot(folders: list[Path], target: Path) -> None:
    """One colour a run: thin, the mean reward of each batch; dots, held-out accuracy."""
    figure, axes = pyplot.subplots(figsize=(7, 3.4), dpi=150)
    for number, folder in enumerate(folders):
        colour = f"C{number}"
        axes.plot(
            *scalars(folder, "reward/mean"),
            color=colour,
            linewidth=0.8,
            alpha=0.6,
            label="in training" if not number else None,
        )
        axes.plot(
            *scalars(folder, "heldout/accuracy"),
            color=colour,
            marker="o",
            markersize=4,
            label=f"{folder.name}, held out",
        )
    axes.set_xlabel("learner steps")
    axes.set_ylabel("accuracy")
    axes.set_ylim(0, 1.02)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="lower right")
    figure.tight_layout()
    figure.savefig(target)


def main() -> None:
    """Read the arguments and plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, help="run folders")
    parser.add_argument("-o", "--output", type=Path, default=Path("runs.png"), help="picture to write")
    given = parser.parse_args()
    plot(given.folders, given.output)


if __name__ == "__main__":
    main()
