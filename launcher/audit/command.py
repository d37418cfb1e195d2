"""The command `spo audit`."""

from __future__ import annotations

import typer

from common import log as logs
from common.errors import UserError
from common.scripts import OverrideOption
from launcher.options import RunArgument, RunConfigOption, run_config
from launcher.run.reopened import reopened


def audit(run: RunArgument = None, config: RunConfigOption = None, override: OverrideOption = None) -> None:
    """Check that a run lost nothing and counted nothing twice, from its journal and its folder.

    The run needs `run.journal: true` from its start on, and must have ended or been stopped. Each task is followed to
    its end; values, batches, advantages, metrics, evaluations and rewards are computed again. Each line says whether a
    statement holds; exit code 1 if one does not.

    - `spo audit runs/mine`
    - `spo audit -c my.yaml -o broker.url=redis://10.0.0.5:6379/0`
    """
    from launcher.audit.lines import audit as audit_lines  # imports what sampler and generator import
    from launcher.audit.records import read_redis

    settings = run_config(run, config, override or ())
    name = settings.run.name
    if not settings.run.journal:
        raise UserError(
            f"run {name} has no journal: run.journal = false; an audit needs run.journal = true from the start"
        )
    with reopened(settings) as broker:
        if alive := broker.processes():
            raise UserError(f"run {name} is running ({', '.join(alive)}); audit it once its processes have ended")
        records = read_redis(broker)
    if not records.journal:
        raise UserError(f"Redis has no journal of run {name}; an audit needs run.journal = true from the start")
    lines = audit_lines(settings, records, logs.setup("launcher"))
    for line in lines:
        typer.echo(line)
    if any(line.problem for line in lines):
        raise SystemExit(1)
