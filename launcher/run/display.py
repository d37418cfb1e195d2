"""Shows a run while it is running: a live view on a terminal, or log lines."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from common.errors import one_line, visible
from common.masking import METRIC
from launcher.folder.time_budget import duration, moved_gpus
from launcher.run.gpu_rows import engine_rows, gpu_rows
from launcher.run.notices import Notice
from launcher.run.progress import PhaseTimer, Progress
from launcher.run.supervisor import RunProcess, Supervisor

BARS = "▁▂▃▄▅▆▇█"
WIDEST = 100  # columns of the live view
CURVE = 40  # bars of a sparkline
MANY = 8  # tables with at least this many columns have no space between them


class View(Protocol):
    def update(self, progress: Progress, supervisor: Supervisor, phases: PhaseTimer) -> None: ...

    def close(self) -> None:
        """End the display; by default there is nothing to do."""
        return


def sparkline(values: list[float], low: float = 0.0, high: float = 1.0) -> str:
    """One bar for each value between `low` and `high`; a space for NaN."""
    span = (high - low) or 1.0
    top = len(BARS) - 1
    return "".join(
        " " if math.isnan(value) else BARS[min(top, max(0, round((value - low) / span * top)))] for value in values
    )


def figures_table(title: str | None, name: str, columns: Sequence[str]) -> Table:
    """A table of named rows of figures, for narrow terminals: names are folded and never cut, figures never broken."""
    padding = (0, 1 if len(columns) < MANY else 0)
    title = None if title is None else escape(one_line(title))
    table = Table(title=title, box=SIMPLE_HEAD, padding=padding, collapse_padding=True, pad_edge=False, show_edge=False)
    table.add_column(name, overflow="fold", min_width=12)
    for column in columns:
        # Titles may break after their first word.
        table.add_column(Text(one_line(column).replace(" ", "\n", 1)), justify="right", no_wrap=True)
    return table


def percent(value: float | None) -> str:
    """A share in percent; a dash for None and NaN."""
    return "–" if value is None or math.isnan(value) else f"{value:.1%}"


def mean_reward(value: float | None) -> str:
    """A mean reward; a dash for None and NaN."""
    return "–" if value is None or math.isnan(value) else f"{value:.3f}"


def differs(reward: float | None, accuracy: float | None) -> bool:
    """Whether a mean held-out reward differs from accuracy, because rewards are not only 0 and 1."""
    return reward is not None and accuracy is not None and not math.isnan(reward) and abs(reward - accuracy) > 1e-9


def saving(variance_ratio: float | None) -> str:
    """The reduction of the advantages' variance by the values, in words."""
    if variance_ratio is None:
        return "–"
    change = 1 - variance_ratio
    return f"saves {change:.0%} of the variance" if change >= 0 else f"adds {-change:.0%} of variance"


def number(value: float | None, digits: int) -> str:
    """A number with thousands separators; a dash for None."""
    return "–" if value is None else f"{value:,.{digits}f}"


def degenerate_share(counters: dict[str, int]) -> float | None:
    """Share of complete groups whose rewards were all equal; None without groups."""
    grouped = counters.get("grouped", 0)
    return counters.get("degenerate", 0) / grouped if grouped else None


def data_size(count: float) -> str:
    """A number of bytes with a unit, in powers of 1,000."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"


class PlainView(View):
    """Logs a line when something has changed, at most every `every` seconds."""

    def __init__(self, log: Any, every: float = 5.0) -> None:
        self.log = log
        self.every = every
        self._next = 0.0
        self._shown: tuple[Any, ...] = ()
        self._warned: set[str] = set()  # names of the problems that were logged

    def update(self, progress: Progress, supervisor: Supervisor, phases: PhaseTimer) -> None:
        while supervisor.notices.unseen:
            notice = supervisor.notices.unseen.popleft()
            self.log.warning(notice.line, process=notice.process)
        for problem in progress.gpu_problems:
            if problem.name not in self._warned:
                self._warned.add(problem.name)
                self.log.warning(problem.line)
        now = time.monotonic()
        counters = progress.counters
        evaluated = progress.evaluated
        state = (phases.current, progress.version, len(progress.evaluations), counters.get("counted"), evaluated)
        if now < self._next or state == self._shown:
            return
        self._next, self._shown = now + self.every, state
        newest = progress.evaluations[-1] if progress.evaluations else None
        values: dict[str, Any] = {
            "phase": phases.current,
            "step": f"{progress.version}/{progress.steps}",
            "reward": progress.rewards[-1] if progress.rewards else None,
            "evaluated": evaluated,
            "heldout_accuracy": newest["accuracy"] if newest else None,
            "heldout_reward": newest.get("reward") if newest else None,
            "ends_early": progress.ends_early,
            "left": None if progress.seconds_left is None else duration(progress.seconds_left),
            "staleness": progress.metric("staleness/mean"),
            "masked": progress.metric(METRIC),
            "left_out": progress.samples_left_out[0] or None,
            "tokens_per_second": progress.tokens_per_second() or None,
            "gpus": "; ".join(f"{name.removeprefix('GPUs, ')} {busy}" for name, busy, _ in gpu_rows(progress)) or None,
            "processes": len(supervisor.alive()),
        }
        self.log.info("progress", **{name: value for name, value in values.items() if value is not None})


class LiveView:
    """The whole run on one screen, drawn in place."""

    def __init__(self, console: Console, title: str) -> None:
        self.title = title
        self.live = Live(console=console, auto_refresh=False, transient=True)
        self.live.start()
        self._next = 0.0
        self._notices: Sequence[Notice] = ()

    def update(self, progress: Progress, supervisor: Supervisor, phases: PhaseTimer) -> None:
        self._notices = supervisor.notices.newest
        now = time.monotonic()
        if now >= self._next:
            self._next = now + 0.5
            frame = render(self.title, progress, supervisor, phases, self.live.console.width)
            self.live.update(frame, refresh=True)

    def close(self) -> None:
        """Remove the view from the screen and print the newest warnings of the processes."""
        self.live.stop()
        for notice in self._notices:
            self.live.console.print(f"warning: {visible(str(notice))}", style="yellow", markup=False, highlight=False)


def render(title: str, progress: Progress, supervisor: Supervisor, phases: PhaseTimer, width: int) -> Panel:
    """One frame of the live view; its width depends only on that of the terminal."""
    minutes, seconds = divmod(int(phases.total()), 60)
    left = "" if progress.seconds_left is None else f"   about {duration(progress.seconds_left)} left"
    heading = Text.assemble((phases.current or "", "bold"), f"   {minutes}:{seconds:02d}", (left, "dim"))
    bar = Table.grid(padding=(0, 1))
    bar.add_row(f"step {progress.version}/{progress.steps}", ProgressBar(progress.steps, progress.version, width=40))
    parts: list[RenderableType] = [heading, bar, Text(), figures(progress), Text()]
    parts.append(process_rows(progress, supervisor.children))
    if notices := supervisor.notices.newest:
        parts += [Text(), *(Text(str(notice), "yellow", no_wrap=True, overflow="ellipsis") for notice in notices)]
    return Panel(Group(*parts), title=escape(one_line(title)), width=min(width, WIDEST))


def figures(progress: Progress) -> Table:
    """The run's figures, a row each; rows that would say nothing are left out."""
    accuracies = [float(evaluation["accuracy"]) for evaluation in progress.evaluations]
    table = Table.grid(padding=(0, 3))
    table.add_row(
        "held-out accuracy",
        percent(accuracies[-1] if accuracies else None),
        _curve(accuracies[-CURVE:], (0.0, 1.0), percent, "evaluations"),
    )
    if any(differs(evaluation.get("reward"), evaluation["accuracy"]) for evaluation in progress.evaluations):
        rewards = [float(evaluation.get("reward", math.nan)) for evaluation in progress.evaluations][-CURVE:]
        known = [reward for reward in rewards if not math.isnan(reward)]
        ends = (min(known, default=0.0), max(known, default=0.0))
        table.add_row("held-out reward", mean_reward(rewards[-1]), _curve(known, ends, mean_reward, "evaluations"))
    if progress.ends_early:
        table.add_row("ends early", f"at step {progress.steps}", Text(progress.ends_early))
    if progress.evaluated:
        table.add_row("held-out answers", one_line(progress.evaluated), "so far, in the running evaluation")
    set_aside = progress.evaluations[-1].get("set_aside", 0) if progress.evaluations else 0
    if set_aside:
        table.add_row("held-out skipped", f"{set_aside:,}", "tasks of the newest evaluation; spo dead")
    if progress.unreadable_evaluations:
        table.add_row(
            "unreadable", f"{progress.unreadable_evaluations}", "evaluations, written by another program or release"
        )
    rewards, ends = list(progress.rewards), progress.reward_range
    # A mean reward between 0 and 1 reads as a share; any other is a number.
    shown: Callable[[float | None], str] = percent if ends == (0.0, 1.0) else partial(number, digits=3)
    table.add_row("reward", shown(rewards[-1] if rewards else None), _curve(rewards[-CURVE:], ends, shown, "steps"))
    stale, oldest = progress.metric("staleness/mean"), progress.metric("staleness/max")
    table.add_row("staleness", f"{number(stale, 2)} versions", f"at most {number(oldest, 0)}")
    if progress.masked:
        last, style = progress.masked[max(progress.masked)], "yellow" if progress.masked_warning else ""
        whole = f"by the correction; {percent(progress.masked_share)} over all steps"
        table.add_row("tokens masked", Text(percent(last), style), whole)
    table.add_row("baseline", saving(progress.variance_ratio), "")
    for row in (*gpu_rows(progress), *engine_rows(progress)):
        table.add_row(*row)
    wasted = progress.gpu_problems
    for problem in wasted:
        table.add_row("fix first", Text(problem.name, "yellow"), problem.line)
    if slow := progress.bottleneck:
        waits = f"learner waits {slow.wait:.0%}, generators {slow.idle:.0%} of the last {slow.steps} steps"
        waits += f", {slow.scoring:.0%} of the episodes for scores" if slow.side == "teachers" else ""
        table.add_row("bottleneck", slow.side, waits)
        # No other split is suggested while something wastes GPUs: it distorts the times that this is computed from.
        if not wasted and progress.split and (gain := moved_gpus(slow, progress.split)):
            table.add_row("GPUs, split", f"{progress.split.learner} + {progress.split.generators}", gain)
    table.add_row("tokens sampled", f"{number(progress.tokens_per_second(), 0)}/s", "")
    counted, dispatched = progress.counters.get("counted", 0), progress.counters.get("dispatched", 0)
    table.add_row("samples counted", f"{counted:,}", f"of {dispatched:,} dispatched")
    if refused := sum(int(process.get("refused") or 0) for process in progress.processes.values()):
        table.add_row("refused requests", f"{refused:,}", "of agents, by the endpoint; the generators' logs say which")
    lost, trained = progress.samples_left_out
    if lost:
        table.add_row(
            Text("left out", "red"), f"{lost:,}", f"of {trained:,} samples: their tokens were gone or unusable"
        )
    if progress.scoring is not None:
        table.add_row("waiting for scores", f"{progress.scoring:,}", "episodes, of teachers")
    if progress.memory.limit:
        table.add_row("Redis' memory", percent(progress.memory.share), f"of {data_size(progress.memory.limit)}")
    if progress.counters.get("grouped"):
        table.add_row("degenerate groups", percent(degenerate_share(progress.counters)), "all rewards of a group equal")
    return table


def _curve(values: list[float], ends: tuple[float, float], shown: Callable[[float | None], str], what: str) -> Text:
    """A sparkline, followed by the values of its lowest and highest bars and by the number of values."""
    if not values:
        return Text()
    axis = f"  {shown(ends[0])} to {shown(ends[1])}, {len(values)} {what}"
    return Text.assemble(sparkline(values, *ends), (axis, "dim"))


def process_rows(progress: Progress, children: dict[str, RunProcess]) -> Table:
    """A table of the processes that were started here, and then of the living ones that joined from elsewhere."""
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for column in ("process", "pid", "state", "version", "tokens/s", "episodes", "at once", "weights", "restarts"):
        table.add_column(column, no_wrap=column == "process")  # if cut, several names would look the same
    seen: set[int] = set()
    for name, child in children.items():
        process = next((process for process in progress.processes.values() if process.get("pid") == child.pid), {})
        state = str(process.get("state", child.state)) if child.state == "running" else child.state
        table.add_row(name, str(child.pid), _coloured(state), *_details(process), str(child.restarts or ""))
        seen.add(child.pid)
    for name, process in progress.processes.items():
        if process.get("pid") not in seen:
            state = str(process.get("state", ""))
            place = f"{process['pid']}@{process['host']}" if "pid" in process else "–"
            cells: tuple[str | Text, ...] = (name, place, _coloured(state), *_details(process), "")
            table.add_row(*(cell if isinstance(cell, Text) else Text(one_line(cell)) for cell in cells))
    return table


def _details(process: dict[str, Any]) -> tuple[str, ...]:
    version = process.get("version")
    speed, episodes = process.get("tokens_per_second"), process.get("episodes")
    playing, most = process.get("playing"), process.get("concurrency")
    return (
        "" if version is None else str(version),
        "" if speed is None else f"{speed:,.0f}",
        "" if episodes is None else f"{episodes:,}",
        "" if most is None else f"{playing} of {most}",
        _weights(process),
    )


def _weights(process: dict[str, Any]) -> str:
    """Where a process gets its weights from, and how many bytes of weights it has sent since its start."""
    source, sent = process.get("source"), process.get("sent_bytes")
    parts = [one_line(f"from {source}")] if source else []
    return ", ".join(parts if sent is None else [*parts, f"sent {data_size(sent)}"])


def _coloured(state: str) -> Text:
    styles = {"running": "green", "restarting": "yellow", "failed": "red", "unreadable": "red", "exited": "dim"}
    return Text(one_line(state), style=styles.get(state, "cyan"))
