"""Command-line options that several `spo` commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from common.options import OverrideOption as Override

__all__ = ["ConfigFile", "Override"]

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="The run's YAML file.")]
