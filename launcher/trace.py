"""The command `spo trace`: merges the timelines of a run's processes into a trace for Perfetto or chrome://tracing."""

from __future__ import annotations

import gzip
import heapq
import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from common.errors import UserError, one_line
from common.log import TIMELINE
from common.process import keep_files_private

MICRO = 1e6
LATEST = 1e12  # Unix seconds; a later time is damage
RESERVED = ("name", "start", "end", "lane")


def trace(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, running or finished.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="FILE", help="By default trace.json.gz in the run folder; *.gz is compressed."
        ),
    ] = None,
) -> None:
    """Write a trace of what each process did, for Perfetto (ui.perfetto.dev) or chrome://tracing.

    It shows episodes, weight pulls and loads, the parts of the learner's steps, what each process waits for,
    evaluations, starts, ends and restarts of processes, and faults. If a run stalls, it shows which process waited for
    which.

    - `spo trace runs/maths`
    - `spo trace runs/maths -o maths.json`
    """
    if not run.is_dir():
        raise UserError(f"{run} is not a run folder")
    events, unreadable = read_timelines(run)
    if not events:
        raise UserError(f"{run} has no events in {TIMELINE}/: no run was started there")
    keep_files_private()
    path = output or run / "trace.json.gz"
    data = json.dumps(chrome_trace(events), separators=(",", ":")).encode()
    try:
        path.write_bytes(gzip.compress(data, 5) if path.suffix == ".gz" else data)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None
    if unreadable:
        typer.echo(f"warning: {unreadable} lines of {run / TIMELINE} cannot be read", err=True)
    typer.echo(one_line(str(path)))


@dataclass(frozen=True, slots=True)
class Event:
    """A slice of a process's time, or an instant if `end` is None; times are in Unix seconds."""

    process: str
    lane: str
    name: str
    start: float
    end: float | None
    details: dict[str, Any] = field(default_factory=dict)


def read_timelines(folder: Path) -> tuple[list[Event], int]:
    """All events in `timeline/` of a run folder, sorted by start, and how many lines could not be read.

    Raises `UserError` if a file cannot be read.
    """
    events, unreadable = [], 0
    for path in sorted((folder / TIMELINE).glob("*.jsonl")):
        process = path.name.removesuffix(".jsonl").removesuffix(".old")
        try:
            text = path.read_bytes()
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}") from None
        for line in filter(bytes.strip, text.split(b"\n")):
            if (event := _event(process, line)) is None:
                unreadable += 1
            else:
                events.append(event)
    return sorted(events, key=lambda event: event.start), unreadable


def chrome_trace(events: Iterable[Event]) -> dict[str, Any]:
    """Events in Chrome's JSON format: each process of the run is a process, each of its lanes one or more threads.

    Slices of a lane that overlap, as episodes do, are spread over several threads, so that no two slices of a thread
    overlap.
    """
    by_lane: defaultdict[tuple[str, str], list[Event]] = defaultdict(list)
    for event in events:
        by_lane[event.process, event.lane].append(event)
    pids = {process: i for i, process in enumerate(sorted({process for process, _ in by_lane}, key=_order), 1)}
    origin = min((event.start for of_lane in by_lane.values() for event in of_lane), default=0.0)
    trace: list[dict[str, Any]] = [
        {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": process}}
        for process, pid in pids.items()
    ]
    tids: defaultdict[str, int] = defaultdict(int)
    for (process, lane), of_lane in sorted(by_lane.items()):
        first = tids[process] + 1
        threads = _placed(of_lane)
        tids[process] += max(thread for thread, _ in threads) + 1
        for number in range(tids[process] - first + 1):
            name = f"{lane or 'main'} {number + 1}" if number else lane or "main"
            trace.append(
                {"ph": "M", "pid": pids[process], "tid": first + number, "name": "thread_name", "args": {"name": name}}
            )
        trace += [_chrome_event(event, pids[process], first + thread, origin) for thread, event in threads]
    return {"traceEvents": trace, "displayTimeUnit": "ms", "otherData": {"unix_seconds_at_0": origin}}


def _placed(events: list[Event]) -> list[tuple[int, Event]]:
    """Pair each event with the lowest thread that is free at its start."""
    placed: list[tuple[int, Event]] = []
    busy: list[tuple[float, int]] = []  # (end, thread)
    free: list[int] = []
    threads = 0
    for event in sorted(events, key=lambda event: event.start):
        while busy and busy[0][0] <= event.start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if event.end is None:
            placed.append((0, event))
            continue
        thread = heapq.heappop(free) if free else threads
        threads = max(threads, thread + 1)
        heapq.heappush(busy, (event.end, thread))
        placed.append((thread, event))
    return placed


def _chrome_event(event: Event, pid: int, tid: int, origin: float) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "name": event.name, "pid": pid, "tid": tid, "ts": round(MICRO * (event.start - origin)), "args": event.details,
    }  # fmt: skip
    if event.end is None:
        return fields | {"ph": "i", "s": "p"}
    # Start and end are rounded, not the duration, so that adjacent slices do not overlap.
    return fields | {"ph": "X", "dur": round(MICRO * (event.end - origin)) - fields["ts"]}


def _event(process: str, line: bytes) -> Event | None:
    try:
        fields = json.loads(line)
        start, end = float(fields["start"]), fields.get("end")
        if not -LATEST < start < LATEST or (end is not None and not start <= float(end) < LATEST):
            return None
        details = {name: value for name, value in fields.items() if name not in RESERVED}
        lane, name = str(fields.get("lane", "")), str(fields["name"])
        return Event(process, lane, name, start, None if end is None else float(end), details)
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def _order(process: str) -> tuple[int, str]:
    first = ("launcher", "sampler", "learner")
    return (first.index(process) if process in first else len(first), process)
