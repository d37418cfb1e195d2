"""The command `spo doctor`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from common import log as logs
from common.config import Config, load_config
from common.errors import UserError
from common.preflight.finding import Finding, ok, problem, warning
from common.preflight.machine import read_machine
from common.process import Role
from common.scripts import OverrideOption
from launcher.doctor.examine import examine
from launcher.doctor.report import report
from launcher.doctor.sandbox import local_isolation
from launcher.run.embedded_redis import find_redis_server
from launcher.run.processes import EMBEDDED

STARTED_BY_RUN = (Role.SAMPLER, Role.GENERATOR, Role.LEARNER)


def doctor(
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", help="The run's YAML file; without it only the machine is checked."),
    ] = None,
    role: Annotated[
        Role | None, typer.Option(help="Check what this process needs; by default sampler, generator and learner.")
    ] = None,
    redis: Annotated[
        str | None,
        typer.Option(metavar="embedded|URL", help="The --redis you will give to `spo run`; by default broker.url."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Findings as JSON.")] = False,
    override: OverrideOption = None,
) -> None:
    """Look for problems that would keep a run from starting, and say how to fix each; exit code 2 if there are any.

    With a configuration it also tries what a start does, all but loading weights: data and columns, chat template,
    tools, simulated user, reward and loss, called on the first rows. With --role it looks at one process alone.

    - `spo doctor`
    - `spo doctor -c my.yaml --redis embedded`
    - `spo doctor -c my.yaml --role generator -o broker.url=redis://10.0.0.5:6379/0`
    - `docker compose run --rm learner spo doctor -c /etc/spo/arithmetic.yaml --role learner`
    """
    overrides = list(override or ())
    if redis is not None and redis != EMBEDDED:
        overrides.append(f"broker.url={redis}")
    settings = load_config(config, overrides) if config else None
    machine = read_machine()
    roles = [role] if role else STARTED_BY_RUN
    findings = {role: examine(role, settings, machine, embedded_redis=redis == EMBEDDED) for role in roles}
    if redis == EMBEDDED:
        server = _embedded_redis()
        for of_role in findings.values():
            of_role.append(server)
    if settings is not None and Role.GENERATOR in findings:
        findings[Role.GENERATOR] += local_isolation(settings)
    if settings is not None and role is None:
        for started, tried in _tried(settings).items():
            findings[started] += tried
    raise SystemExit(report(findings, as_json=as_json))


def _tried(config: Config) -> dict[Role, list[Finding]]:
    """What the processes would find while they start: data, model, tools, users, rewards and losses are loaded."""
    try:
        from launcher.run.dry_run import dry_run  # imports what the processes import
    except ImportError as error:
        return {Role.GENERATOR: [warning("start", f"not tried, since {error.name} is not installed here")]}
    sys.stderr.write("trying what the processes do when they start, without weights\n")
    return dry_run(config, logs.setup("doctor"))


def _embedded_redis() -> Finding:
    try:
        return ok("redis", f"{find_redis_server()} will be started")
    except UserError as error:
        return problem("redis", str(error))
