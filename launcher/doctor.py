"""`spo doctor`: what a run needs of this machine and of the services around it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from common.config import Config, load_config
from common.doctor.examine import examine
from common.doctor.finding import Finding, ok, problem
from common.doctor.machine import read_machine
from common.doctor.report import report
from common.doctor.sandbox import needs_sandbox
from common.errors import UserError
from common.options import OverrideOption
from common.role import Role
from launcher.embedded_redis import find_redis_server
from launcher.local_run import EMBEDDED

# What `spo run` starts.
ALL = (Role.SAMPLER, Role.GENERATOR, Role.LEARNER)


def doctor(
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", help="The run's YAML file; without it only the machine is looked at."),
    ] = None,
    role: Annotated[
        Role | None, typer.Option(help="Only what this process needs; by default sampler, generator and learner.")
    ] = None,
    redis: Annotated[
        str | None,
        typer.Option(
            metavar="embedded|URL", help="As of `spo run`: embedded if that is to start one; by default broker.url."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Findings as JSON.")] = False,
    override: OverrideOption = None,
) -> None:
    """Look for what would keep a run from starting, and say how to mend it; exit code 2 where something would.

    In a container of one role, where `spo` has not what it needs: `python -m common.doctor ROLE -c CONFIG`.

    - `spo doctor`
    - `spo doctor -c my.yaml --redis embedded`
    - `spo doctor -c my.yaml --role generator -o broker.url=redis://10.0.0.5:6379/0`
    """
    overrides = list(override or ())
    if redis is not None and redis != EMBEDDED:
        overrides.append(f"broker.url={redis}")
    settings = load_config(config, overrides) if config else None
    machine = read_machine()
    found = {each: examine(each, settings, machine, own_redis=redis == EMBEDDED) for each in ([role] if role else ALL)}
    if redis == EMBEDDED:
        server = _embedded()
        for findings in found.values():
            findings.append(server)
    if settings is not None and settings.sandbox.url is None and needs_sandbox(settings) and Role.GENERATOR in found:
        found[Role.GENERATOR].append(_isolation(settings))
    raise SystemExit(report(found, as_json=as_json))


def _embedded() -> Finding:
    try:
        return ok("redis", f"{find_redis_server()} will be started")
    except UserError as error:
        return problem("redis", str(error))


def _isolation(config: Config) -> Finding:
    """Programs are to run on this machine: whether they can be kept in, by trying to get out."""
    from sandbox_client import make_sandbox  # takes its time, and only this check needs it

    try:
        make_sandbox(config.sandbox)
    except UserError as error:
        return problem("sandbox", str(error))
    return ok("sandbox", "programs run isolated on this machine")
