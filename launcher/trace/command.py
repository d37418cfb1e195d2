"""The command `spo trace`."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Annotated

import typer

from common.errors import UserError, one_line
from common.log import TIMELINE
from common.process import keep_files_private
from launcher.trace.events import chrome_trace, read_timelines


def trace(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, which may be running or over.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="FILE", help="By default trace.json.gz in the run folder; .gz is compressed."
        ),
    ] = None,
) -> None:
    """Write who did what when as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing.

    Episodes, weight pulls and loads, the parts of the learner's steps, what each process waits for, evaluations,
    starts, ends and restarts of processes, and faults. Where a run stands still, the trace shows who waited for whom.

    - `spo trace runs/maths`
    - `spo trace runs/maths -o maths.json`
    """
    if not run.is_dir():
        raise UserError(f"{run} is no run folder")
    timelines = read_timelines(run)
    if not timelines.events:
        raise UserError(f"{run} has no events in {TIMELINE}/: no run was started there, or one of an earlier release")
    keep_files_private()
    path = output or run / "trace.json.gz"
    data = json.dumps(chrome_trace(timelines.events), separators=(",", ":")).encode()
    try:
        path.write_bytes(gzip.compress(data, 5) if path.suffix == ".gz" else data)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None
    if timelines.unreadable:
        typer.echo(f"warning: {timelines.unreadable} lines of {run / TIMELINE} cannot be read", err=True)
    typer.echo(one_line(str(path)))
