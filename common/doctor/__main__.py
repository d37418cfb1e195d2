"""The checks for one role, where nothing but its own packages is installed: `python -m common.doctor ROLE`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from common.config import load_config
from common.doctor.examine import examine
from common.doctor.machine import read_machine
from common.doctor.report import report
from common.errors import reports_user_errors
from common.options import OverrideOption
from common.role import Role

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def doctor(
    role: Annotated[Role, typer.Argument(help="Which process is to run here.")],
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", help="The run's YAML file; without it only the machine is looked at."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Findings as JSON.")] = False,
    override: OverrideOption = None,
) -> None:
    """Look at what a process of a role needs, here and now; exit code 2 where it could not run.

    docker compose run --rm learner python -m common.doctor learner -c /etc/spo/arithmetic.yaml
    """
    settings = load_config(config, override or ()) if config else None
    raise SystemExit(report({role: examine(role, settings, read_machine())}, as_json=as_json))


main = reports_user_errors(app)

if __name__ == "__main__":
    main()
