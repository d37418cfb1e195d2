"""The command `spo report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from common.errors import UserError, one_line
from common.process import keep_files_private


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, which may be running, over or broken.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="By default report.html in the run folder.")
    ] = None,
    pictures: Annotated[
        Path | None, typer.Option("--png", metavar="FOLDER", help="Write each chart as a PNG file too.")
    ] = None,
) -> None:
    """Write one HTML file about a run: accuracy with its band, curves, configuration, episodes, time, books, versions.

    It needs nothing else to be read: neither the run folder nor a network.

    - `spo report runs/quickstart-1`
    - `spo report runs/maths -o maths.html --png pictures/`
    """
    from launcher.report.drawing import check_installed  # imports numpy, like all that follows

    check_installed()
    from launcher.report.run_data import read_run
    from launcher.report.run_report import report as page
    from launcher.report.run_report import write_pictures

    keep_files_private()
    read = read_run(run)
    path = output or read.folder / "report.html"
    write(path, page(read))
    typer.echo(one_line(str(path)))
    if pictures is not None:
        try:
            for picture in write_pictures(read, pictures):
                typer.echo(one_line(str(picture)))
        except OSError as error:
            raise UserError(f"{pictures} cannot be written: {error.strerror}") from None


def write(path: Path, text: str) -> None:
    """Write a page; raises `UserError` where that cannot be done."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None
