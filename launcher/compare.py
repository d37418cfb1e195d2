"""The command `spo compare`: shows the settings in which runs differ, their results, and curves with bands over seeds.

Runs that differ only in their seed form a group, which is one line of the comparison.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from common.errors import UserError, nearest, one_line
from common.process import keep_files_private
from launcher.folder.run import Run, read_run
from launcher.folder.run_folder import find_runs
from launcher.folder.settings import NAMES, defaults, setting
from launcher.folder.statistics import Band, Curve, finite, first_reaching, over_runs, spread
from launcher.folder.time_budget import bottleneck, duration, total_seconds
from launcher.page.charts import SMOOTHED, Chart, curve, lines, panel, table
from launcher.page.panels import panels
from launcher.page.saved import save
from launcher.run.display import figures_table

# Charts of the dashboard whose first curve is drawn for each line of the comparison.
CURVES = ("accuracy", "reward", "variance", "entropy", "divergence", "trained")
NOTE = (
    "Range of a mean: lowest and highest of several runs; for the accuracy of a single run, 95% over prompts. "
    "Reward: mean of the last batches. tok/s: tokens sampled and trained on, over the run's whole time."
)
SEED = "run.seed"
# Settings that define what is learned; how it is learned may differ between comparable runs.
TASK = ("data.*", "episode.reward", "episode.reward_options", "episode.tools", "episode.tool_options", "episode.user*")
LONGEST = 48  # characters of a label


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, or a folder of runs.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Also save the page of these runs as HTML.")
    ] = None,
    group_by: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="Group runs by their value of this key; may be given several times."),
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Count samples up to this held-out accuracy; by default the highest that all runs reached.",
        ),
    ] = None,
) -> None:
    """Compare runs: where their configurations differ, and their results.

    Runs that differ only in their seed are shown as one line: mean, lowest and highest.

    - `spo compare runs/quickstart-1 runs/quickstart-2 runs/quickstart-3`
    - `spo compare runs/ --group-by learner.lr --threshold 0.8 -o compared.html`
    """
    folders = find_runs(runs)
    if len(folders) < 2:
        raise UserError(f"{folders[0].path} alone cannot be compared: name two runs or more")
    keep_files_private()
    read = list(map(read_run, folders))
    comparison = compared(read, group_by or [], threshold)
    for warning in comparison.warnings:
        sys.stderr.write(f"warning: {one_line(warning)}\n")
    console = Console()
    if comparison.differing:
        console.print(_differing_table(comparison))
    console.print(_figures_table(comparison))
    console.print(Text(NOTE, "dim"))
    if sides := [f"{run.name} {side}" for run in read if (side := _bottleneck(run))]:
        console.print(Text(one_line(f"Bottleneck over the newest steps: {', '.join(sides)}."), "dim"))
    if output is not None:
        save(output, f"{len(read)} runs compared", read, comparison_panel(comparison))
        typer.echo(one_line(str(output)))


RunGroup = tuple[str, list[Run]]  # the label of a line, and its runs


def group_runs(runs: Sequence[Run], by: Sequence[str]) -> list[RunGroup]:
    """Groups of runs, each of which is shown as one line, in the order in which the runs were given.

    Args:
        by: keys of the configuration whose values must be the same; if empty, all but the run's seed and names.

    Raises:
        UserError: none of the runs has such a key.
    """
    for key in by:
        if not any(key in run.values for run in runs):
            near = nearest(key, sorted({name for run in runs for name in run.values}))
            hint = f"; did you mean {near}?" if near else ""
            raise UserError(f"--group-by {key}: the runs have no such key{hint}")
    members: dict[str, list[Run]] = {}
    for run in runs:
        values = {key: run.values.get(key) for key in by} if by else shared(run)
        members.setdefault(json.dumps(values, sort_keys=True, default=str), []).append(run)
    groups = list(members.values())
    keys = list(by) or list(differences([group[0] for group in groups]))
    return [(_label(group, keys, len(groups)), group) for group in groups]


def shared(run: Run) -> dict[str, Any]:
    """The settings that runs of one group share: all but the seed, names and paths."""
    values = defaults() | run.values if run.values else {}
    return {key: value for key, value in values.items() if key != SEED and key not in NAMES}


def differences(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Keys in which runs differ, with one value per run; a dash if a run has no such key."""
    values = [shared(run) for run in runs]
    keys = dict.fromkeys(key for run_values in values for key in run_values)
    texts = {key: [setting(own[key]) if key in own else "–" for own in values] for key in keys}
    return {key: own_texts for key, own_texts in texts.items() if len(set(own_texts)) > 1}


def _label(runs: list[Run], keys: list[str], lines: int) -> str:
    """The label of a line: the values in which it differs from the others, or the runs' names if that is too long."""
    values = one_line(", ".join(f"{key.rpartition('.')[2]}={setting(runs[0].values.get(key))}" for key in keys))
    if lines > 1 and values and len(values) <= LONGEST:
        return values
    names = sorted(run.name for run in runs)
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


@dataclass(frozen=True, slots=True)
class ComparedLine:
    """One line of the comparison."""

    label: str
    runs: list[Run]
    figures: dict[str, Band | None]  # by column, over the runs that have a value; None if none has
    reached: int  # how many of the runs reached the threshold

    @property
    def title(self) -> str:
        return self.label if len(self.runs) == 1 else f"{self.label} ({len(self.runs)} runs)"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Several runs side by side."""

    lines: list[ComparedLine]
    differing: dict[str, list[str]]  # keys in which the lines differ, with one value per line
    columns: dict[str, str]  # titles of the figures, by name
    warnings: list[str]


def compared(runs: Sequence[Run], by: Sequence[str], threshold: float | None) -> Comparison:
    """Compare runs, in groups as `group_runs` makes them.

    Args:
        threshold: held-out accuracy to count samples to; None means the highest that all runs have reached.
    """
    groups = group_runs(runs, by)
    if threshold is None:
        best = [accuracy.values.max() for run in runs if len((accuracy := _accuracy(run)).values)]
        threshold = float(min(best)) if best else None
    columns = {
        "before": "accuracy before", "after": "after", "reward": "reward",
        "samples": "samples" if threshold is None else f"samples to {threshold:.1%}",
        "seconds": "time", "rate": "tok/s",
    }  # fmt: skip
    return Comparison(
        [_line(group, threshold) for group in groups],
        differences([members[0] for _, members in groups]),
        columns,
        list(_warnings(runs, groups, by)),
    )


def cells(line: ComparedLine) -> list[str]:
    """The figures of a line as text, in the order of the columns."""
    texts: dict[str, Callable[[float], str]] = {
        "before": "{:.1%}".format, "after": "{:.1%}".format, "reward": "{:.2f}".format, "samples": "{:,.0f}".format,
        "seconds": duration, "rate": "{:,.0f}".format,
    }  # fmt: skip
    shown = {name: _range(band, texts[name]) for name, band in line.figures.items()}
    if 0 < line.reached < len(line.runs):
        shown["samples"] += f" ({line.reached} of {len(line.runs)})"
    return list(shown.values())


def comparison_panel(comparison: Comparison) -> dict[str, Any]:
    """The comparison as a panel, which the page shows above the panels of the runs."""
    titles = [line.title for line in comparison.lines]
    rows = [[line.title, *cells(line)] for line in comparison.lines]
    differing = [[key, *values] for key, values in comparison.differing.items()]
    runs = [
        [line.label, run.name, str(run.values.get(SEED, "–")), run.state, _bottleneck(run) or "–"]
        for line in comparison.lines
        for run in line.runs
    ]
    tables = [
        table("lines-compared", "Results", ["runs", *comparison.columns.values()], rows, note=NOTE),
        table("what-differs", "Differing settings", ["key", *titles], differing, "None but the seed."),
        table("runs-compared", "Runs", ["line", "run", "seed", "state", "bottleneck"], runs),
    ]
    several = any(len(line.runs) > 1 for line in comparison.lines)
    charts = _charts(comparison.lines) if several else []
    return panel("comparison", f"{len(runs)} runs compared", [*tables, *charts])


def _charts(compared_lines: Sequence[ComparedLine]) -> list[Chart]:
    """One curve per line: the mean over its runs, in a band from the lowest to the highest."""
    drawn = {
        run.name: {chart["name"]: chart for one in panels(run) for chart in one["charts"]}
        for line in compared_lines
        for run in line.runs
    }
    charts = []
    for name in CURVES:
        like = drawn[compared_lines[0].runs[0].name][name]
        of_lines = []
        for line in compared_lines:
            firsts = [chart["lines"][0] for run in line.runs if (chart := drawn[run.name][name])["lines"]]
            curves = [Curve(np.array(one["x"], float), np.array(one["y"], float)) for one in firsts]
            mean, low, high = over_runs(curves)
            of_lines.append(curve(line.title, mean, low, high) if len(firsts) > 1 else curve(line.title, mean))
        note = "Mean over the runs of a line; band: lowest to highest."
        charts.append(lines(f"{name}-compared", like["title"], of_lines, like["unit"], note=note))
    return [chart for chart in charts if chart["lines"]]


def _line(group: RunGroup, threshold: float | None) -> ComparedLine:
    label, runs = group
    of_runs = [_figures(run, threshold) for run in runs]
    bands: dict[str, Band | None] = {}
    for name in of_runs[0]:
        values = [figures[name] for figures in of_runs if math.isfinite(figures[name])]
        bands[name] = spread(values) if values else None
    if len(runs) == 1 and (evaluated := runs[0].evaluations()):
        bands |= {"before": evaluated[0].accuracy(), "after": evaluated[-1].accuracy()}
    return ComparedLine(label, runs, bands, sum(math.isfinite(figures["samples"]) for figures in of_runs))


def _figures(run: Run, threshold: float | None) -> dict[str, float]:
    """The figures of one run; NaN for those it lacks."""
    accuracy, reward = _accuracy(run), finite(run.metrics.series("reward/mean", "sampler")).values
    tokens = float(np.nansum(run.metrics.series("tokens/model", "learner").values))
    seconds = total_seconds(run.metrics, run.phases()) or math.nan
    reached = None if threshold is None else first_reaching(accuracy, threshold)
    return {
        "before": float(accuracy.values[0]) if len(accuracy.values) else math.nan,
        "after": float(accuracy.values[-1]) if len(accuracy.values) else math.nan,
        "reward": float(reward[-SMOOTHED:].mean()) if len(reward) else math.nan,
        "samples": math.nan if reached is None else _samples_until(run, reached),
        "seconds": seconds,
        "rate": tokens / seconds if tokens else math.nan,
    }


def _bottleneck(run: Run) -> str:
    slow = bottleneck(run.metrics)
    return slow.side if slow else ""


def _accuracy(run: Run) -> Curve:
    evaluated = run.evaluations()
    means = [float(evaluation.accuracies.mean()) for evaluation in evaluated]
    return Curve(np.array([evaluation.version for evaluation in evaluated], float), np.array(means))


def _samples_until(run: Run, version: int) -> float:
    """Training samples that were counted until a version was published."""
    versions, _, values = run.metrics.series("samples/rewarded", "sampler")
    if not len(versions):
        batch_size = run.values.get("sampler.batch_size")
        return float(version * batch_size) if isinstance(batch_size, int) else math.nan
    return float(np.interp(version, np.concatenate([[0], versions]), np.concatenate([[0.0], values])))


def _warnings(runs: Sequence[Run], groups: Sequence[RunGroup], by: Sequence[str]) -> Iterator[str]:
    if tasks := [key for key in differences(runs) if any(fnmatchcase(key, pattern) for pattern in TASK)]:
        yield f"the runs learn different tasks ({', '.join(tasks)}), so their figures cannot be compared"
    for label, members in groups if by else ():
        if within := [key for key in differences(members) if key not in by]:
            yield f"the runs of {label} differ in more than their seed: {', '.join(within)}"
    if unfinished := [f"{run.name} ({run.state}, step {run.step})" for run in runs if run.state != "finished"]:
        yield f"not finished: {', '.join(unfinished)}"
    if unevaluated := [run.name for run in runs if not run.evaluations()]:
        yield f"without a held-out evaluation: {', '.join(unevaluated)}"


def _range(band: Band | None, text: Callable[[float], str]) -> str:
    """A mean, followed by its range unless both ends are the same."""
    if band is None:
        return "–"
    mean, low, high = map(text, band)
    if low == high:
        return mean
    # The unit is written once if both ends have the same.
    number, _, unit = low.removesuffix("%").rpartition(" ")
    is_short = number.isdecimal() and high.endswith(f" {unit}") and high.count(" ") == 1
    return f"{mean} ({number if is_short else low.removesuffix('%')}–{high})"


def _differing_table(comparison: Comparison) -> Table:
    made = Table(title="differing settings", box=SIMPLE_HEAD, padding=(0, 1))
    made.add_column("key", overflow="fold")
    for line in comparison.lines:
        made.add_column(Text(one_line(line.label)), overflow="fold")
    for key, values in comparison.differing.items():
        made.add_row(*(Text(one_line(cell)) for cell in (key, *values)))
    return made


def _figures_table(comparison: Comparison) -> Table:
    made = figures_table("results", "runs", list(comparison.columns.values()))
    for line in comparison.lines:
        # Each band goes below its mean: side by side they would be too wide for most terminals.
        figures = (cell.replace(" (", "\n").rstrip(")") for cell in cells(line))
        made.add_row(Text(one_line(line.title)), *figures)
    return made
