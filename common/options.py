"""Command-line options that every process has."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigOption = Annotated[Path, typer.Option("--config", "-c", help="The run's YAML file.")]
OverrideOption = Annotated[
    list[str] | None,
    typer.Option("-o", "--override", metavar="KEY=VALUE", help="Override one key; may be given several times."),
]
