"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from common.config import Config, load_config
from common.errors import UserError

Generators = Annotated[
    int | None,
    typer.Option(min=0, help="Generators to start, by default one for each free GPU or four cores; 0: none here."),
]
LearnerGpus = Annotated[
    str | None,
    typer.Option(metavar="0-3", help="GPUs of the learner, one rank on each; by default half of them, if that fits."),
]
GeneratorGpus = Annotated[
    str | None, typer.Option(metavar="4-7", help="GPUs of the generators; by default the others.")
]
TeacherGpus = Annotated[
    str | None, typer.Option(metavar="6-7", help="GPUs of the teachers' servers; by default the last ones.")
]
Plain = Annotated[bool, typer.Option("--plain", help="Plain lines instead of the live view (as without a terminal).")]
RunArgument = Annotated[
    Path | None, typer.Argument(metavar="RUN", help="Run folder; or give a YAML file with -c.", show_default=False)
]
RunConfigOption = Annotated[
    Path | None, typer.Option("--config", "-c", help="The run's YAML file, instead of its folder.")
]
RedisOption = Annotated[
    str, typer.Option("--redis", metavar="embedded|URL", help="Start a server for this run, or use a running one.")
]


def run_config(run: Path | None, config: Path | None, overrides: Sequence[str]) -> Config:
    """The configuration of a run that is named by its folder or by a YAML file.

    Raises:
        UserError: neither or both are given, the folder is not a run folder, or the configuration cannot be read.
    """
    if (run is None) == (config is None):
        raise UserError("name the run: either its folder, or its YAML file with -c")
    path = config or run
    assert path is not None
    if run is not None and not run.exists():
        raise UserError(f"{run} is not a run folder: it does not exist")
    if path.is_dir():
        path = path / "config.yaml"
        if not path.is_file():
            raise UserError(f"{path.parent} is not a run folder: it has no config.yaml")
    return load_config(path, overrides)
