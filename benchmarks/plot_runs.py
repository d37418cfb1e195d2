"""Plots reward and held-out accuracy of finished runs. `python -m benchmarks.plot_runs RUN_FOLDER... -o FILE.png`.

Held-out accuracy has a band of 95% over prompts, as `spo report` has it. Runs whose folders differ in their
last number only share a panel: quickstart-code-1, quickstart-code-2, ...
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import options, plots
from common.errors import reports_user_errors
from launcher.folder.run import read_one
from launcher.folder.statistics import finite


def grouped(folders: list[Path]) -> dict[str, list[Path]]:
    """Runs by their names without the numbers, in the order given."""
    groups: dict[str, list[Path]] = {}
    for folder in folders:
        groups.setdefault(folder.resolve().name.rstrip("0123456789").rstrip("-"), []).append(folder)
    return groups


def plot(folders: list[Path], target: Path) -> None:
    """A panel a group, a colour a run: thin, the mean reward of each batch; dots, held-out accuracy."""
    groups = grouped(folders)
    width, height = (7, 3.4) if len(groups) == 1 else (3.6, 3.2)
    figure, (panels,) = plots.panels(1, len(groups), width, height, dpi=150)
    for axes, (name, runs) in zip(panels, groups.items(), strict=True):
        _panel(axes, runs)
        if len(groups) > 1:
            axes.set_title(name)
    panels[0].set_ylabel("accuracy")
    plots.save(figure, target)


def _panel(axes: Any, folders: list[Path]) -> None:
    for number, folder in enumerate(folders):
        colour, run = f"C{number}", read_one(folder)
        axes.plot(
            *finite(run.metrics.series("reward/mean", "sampler")),
            color=colour,
            linewidth=0.8,
            alpha=0.6,
            label="in training" if not number else None,
        )
        bands = {evaluation.version: evaluation.accuracy() for evaluation in run.evaluations()}
        means = np.array([mean for mean, _, _ in bands.values()])
        ends = np.array([(low, high) for _, low, high in bands.values()]).T
        axes.errorbar(
            list(bands),
            means,
            np.abs(ends - means),
            color=colour,
            marker="o",
            markersize=4,
            capsize=2,
            label=f"{folder.name}, held out",
        )
    axes.set_xlabel("learner steps")
    axes.set_ylim(0, 1.02)
    axes.legend(frameon=False, loc="lower right", fontsize="small")


@reports_user_errors
def main() -> None:
    parser = options.Parser(__doc__)
    parser.add_argument("folders", nargs="+", type=options.folder, help="run folders")
    parser.add_argument("-o", "--output", type=options.new_file, default=Path("runs.png"), help="picture to write")
    args = parser.parse_args()
    plot(args.folders, args.output)


if __name__ == "__main__":
    main()
