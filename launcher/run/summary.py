"""The results of a run: the closing table, and the same figures as `summary.json`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from common.errors import one_line
from common.files import STEP, checkpoint, checkpoints
from launcher.run.display import degenerate_share, differs, figures_table, mean_reward, percent, saving
from launcher.run.progress import PhaseTimer, Progress
from launcher.run.supervisor import Supervisor


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a run, also in `summary.json` of its folder.

    Attributes:
        finished: whether all steps were trained and the last checkpoint is on the disk.
        steps: the newest weight version.
        accuracy_before, accuracy_after: held-out accuracy of version 0 and of the newest evaluation; None if there was
            no such evaluation.
        heldout_figures: the newest evaluation's figures, such as `pass@8`.
        counters: tasks and samples, by what became of them.
        seconds: wall time by phase.
        restarts: how often each process was started again.
        folder: the run folder.
        error: why the run failed; None if it finished or was stopped.
        left_out: number of samples in batches (counter `batched`) that could not be trained on.
        ended_early: why the run stopped early by `run.stop_when`; None if it did not.
    """

    finished: bool
    accuracy_before: float | None
    accuracy_after: float | None
    heldout_samples: int
    steps: int
    counters: dict[str, int]
    seconds: dict[str, float]
    restarts: dict[str, int]
    folder: str
    variance_ratio: float | None = None
    heldout_figures: dict[str, float] = field(default_factory=dict)
    masked: float | None = None
    masked_warning: str | None = None
    error: str | None = None
    left_out: int = 0
    batched: int = 0
    reward_before: float | None = None
    reward_after: float | None = None
    ended_early: str | None = None

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")


def summarize(progress: Progress, phases: PhaseTimer, supervisor: Supervisor, folder: Path) -> Summary:
    evaluations = progress.evaluations
    before = evaluations[0] if evaluations and evaluations[0]["version"] == 0 else {}
    after = evaluations[-1] if evaluations else {}
    return Summary(
        finished=progress.finished,
        accuracy_before=before.get("accuracy"),
        accuracy_after=after.get("accuracy"),
        reward_before=before.get("reward"),
        reward_after=after.get("reward"),
        heldout_samples=int(after.get("samples", 0)),
        steps=progress.version,
        counters=dict(progress.counters),
        seconds={name: round(value, 2) for name, value in phases.seconds.items()},
        restarts={name: child.restarts for name, child in supervisor.children.items() if child.restarts},
        folder=str(folder),
        variance_ratio=progress.variance_ratio,
        heldout_figures=after.get("figures", {}),
        masked=progress.masked_share,
        masked_warning=progress.masked_warning,
        left_out=progress.samples_left_out[0],
        batched=progress.samples_left_out[1],
        ended_early=progress.ends_early,
    )


def next_steps(summary: Summary) -> str:
    """The trained model and useful commands for a finished run, one per line."""
    folder = Path(summary.folder)
    names = (path.parent.name.removeprefix(STEP) for path in checkpoints(folder).glob(f"{STEP}*/hf"))
    versions = [int(name) for name in names if name.isdecimal()]
    lines = [("the trained model", str(checkpoint(folder, max(versions)) / "hf"))] if versions else []
    more = "run.stop_when=null" if summary.ended_early else f"run.steps={2 * max(1, summary.steps)}"
    lines += [
        ("a report", f"spo report {folder}"),
        ("its curves and episodes", f"spo dashboard {folder}"),
        ("more steps", f"spo run {folder / 'config.yaml'} -o {more}"),
        ("another run from here", f"spo fork {folder} {folder}-2 -o run.steps={2 * max(1, summary.steps)}"),
    ]
    return "\n".join(f"{what + ':':<25}{command}" for what, command in lines)


def table(summary: Summary) -> RenderableType:
    ending = "finished" if summary.finished else "stopped" if summary.error is None else "not finished"
    made = Table(title=f"run {ending}", show_header=False)
    made.add_column(style="bold")
    made.add_column()
    before, after = percent(summary.accuracy_before), percent(summary.accuracy_after)
    made.add_row("held-out accuracy", f"{before} → {after}   ({summary.heldout_samples} samples)")
    rewards = (summary.reward_before, summary.reward_after)
    if differs(rewards[0], summary.accuracy_before) or differs(rewards[1], summary.accuracy_after):
        made.add_row("held-out reward", " → ".join(map(mean_reward, rewards)))
    made.add_row("steps", f"{summary.steps}")
    if summary.ended_early:
        made.add_row("ended early", Text(summary.ended_early))
    if summary.variance_ratio is not None:
        made.add_row("baseline", saving(summary.variance_ratio))
    if summary.masked is not None:
        made.add_row("tokens masked", f"{percent(summary.masked)}   (by the off-policy correction)")
    counters = summary.counters
    dispatched, counted = counters.get("dispatched", 0), counters.get("counted", 0)
    verdict = "each counted once" if dispatched == counted else "some are still on their way"
    made.add_row("tasks", f"{dispatched:,} dispatched, {counted:,} counted: {verdict}")
    if counters.get("grouped"):
        made.add_row("degenerate groups", f"{percent(degenerate_share(counters))}   (all rewards of a group equal)")
    if summary.left_out:
        made.add_row(
            "left out", f"{summary.left_out:,} of {summary.batched:,} samples: their tokens were gone or unusable"
        )
    if counters.get("dead"):
        made.add_row("dead letters", f"{counters['dead']:,}   (spo dead)")
    minutes, rest = divmod(sum(summary.seconds.values()), 60)
    made.add_row("wall time", f"{minutes:.0f} min {rest:.0f} s")
    for name, seconds in summary.seconds.items():
        made.add_row(f"  {name}", f"{seconds:.1f} s")
    restarts = ", ".join(f"{name} ×{count}" for name, count in summary.restarts.items())
    made.add_row("restarts", restarts or "none")
    made.add_row("run folder", Text(one_line(summary.folder)))
    parts: list[RenderableType] = [made]
    if summary.masked_warning:
        parts.append(Text(f"warning: {summary.masked_warning}", "yellow"))
    if summary.heldout_figures:
        parts += ["", evaluation_table(summary.heldout_figures)]
    return Group(*parts)


def evaluation_table(figures: Mapping[str, float], title: str = "held-out figures") -> Table:
    """A row for each data set, each value of `eval.by_column` and all; a column for each of `summarize_groups`."""
    columns = [name for name in figures if "/" not in name and (name != "set_aside" or figures[name])]
    groups = list(dict.fromkeys(name.rpartition("/")[0] for name in figures if "/" in name))
    table = figures_table(title, "data", [name.replace("_", " ") for name in columns])
    for group in [*groups, ""]:
        values = [figures.get(f"{group}/{name}" if group else name, math.nan) for name in columns]
        cells = (_cell(name, value) for name, value in zip(columns, values, strict=True))
        table.add_row(Text(one_line(group) or "all"), *cells)
    return table


def _cell(name: str, value: float) -> str:
    if math.isnan(value):
        return "–"
    if name in ("samples", "set_aside"):
        return f"{value:,.0f}"
    return f"{value:.3f}" if name == "reward" else f"{value:.1%}"
