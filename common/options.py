"""Command-line options that all commands share."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

HELP = {"help_option_names": ["-h", "--help"]}


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"spo-trainer {version('spo-trainer')}")
        raise typer.Exit


VersionOption = Annotated[
    bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version of SPO and exit.")
]
ConfigArgument = Annotated[Path, typer.Argument(metavar="CONFIG", help="The run's YAML file.")]
ConfigOption = Annotated[Path, typer.Option("--config", "-c", help="The run's YAML file.")]
OverrideOption = Annotated[
    list[str] | None,
    typer.Option("-o", "--override", metavar="KEY=VALUE", help="Override one key; may be given several times."),
]
ResumeOption = Annotated[
    bool,
    typer.Option(
        "--resume", help="Where Redis has lost the run, continue from the newest checkpoint instead of refusing to."
    ),
]
