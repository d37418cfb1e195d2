"""The command `spo compare`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from common.errors import UserError, one_line
from common.process import keep_files_private
from launcher.compare.comparison import NOTE, Comparison, cells, compared, comparison_panel
from launcher.folder.run import read_run
from launcher.folder.run_folder import find_runs
from launcher.page.saved import save


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, or a folder that holds some.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Save the dashboard's page of them too.")
    ] = None,
    group_by: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="Runs with the same value of this key are one line; several times if needed."),
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option(
            min=0, max=1, help="Held-out accuracy to count samples to; by default the highest that all runs reached."
        ),
    ] = None,
) -> None:
    """Compare runs: what differs in their configurations, and what came out.

    Runs that differ only in their seed are one line: mean, lowest and highest.

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
        console.print(_differing(comparison))
    console.print(_figures(comparison))
    console.print(Text(NOTE, "dim"))
    if output is not None:
        save(output, f"{len(read)} runs compared", read, comparison_panel(comparison))
        typer.echo(one_line(str(output)))


def _differing(comparison: Comparison) -> Table:
    table = Table(title="what differs", box=SIMPLE_HEAD, padding=(0, 1))
    table.add_column("key", overflow="fold")
    for line in comparison.lines:
        table.add_column(Text(one_line(line.group.label)), overflow="fold")
    for key, values in comparison.differing.items():
        table.add_row(*(Text(one_line(cell)) for cell in (key, *values)))
    return table


def _figures(comparison: Comparison) -> Table:
    table = Table(
        title="what came out", box=SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False, show_edge=False
    )
    table.add_column("runs", overflow="fold", min_width=12)
    for title in comparison.columns.values():
        # Titles break after their first word, figures not at all.
        table.add_column(title.replace(" ", "\n", 1), justify="right", no_wrap=True)
    for line in comparison.lines:
        # Means below one another, and their bands: a line of all would be too wide for most terminals.
        figures = (cell.replace(" (", "\n").rstrip(")") for cell in cells(line))
        table.add_row(Text(one_line(line.title)), *figures)
    return table
