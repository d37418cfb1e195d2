"""The command `spo doctor`: the checks it adds to those of `common/checks/`, and how findings are printed."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from common import log as logs
from common.checks.check import STARTED, Check, Context, Finding, Level, Need, When, examine, ok, warning
from common.checks.list import CHECKS
from common.checks.machine import read_machine
from common.checks.services import runs_programs
from common.config import Config, changed_config, load_config
from common.errors import one_line
from common.process import Role
from common.scripts import OverrideOption
from launcher.run.embedded_redis import find_redis_server
from launcher.run.processes import EMBEDDED

STYLES = {Level.OK: "green", Level.WARNING: "yellow", Level.PROBLEM: "bold red"}


def doctor(
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", help="The run's YAML file; without it only the machine is checked."),
    ] = None,
    role: Annotated[
        Role | None, typer.Option(help="Check what this process needs; by default all that `spo run` starts.")
    ] = None,
    redis: Annotated[
        str | None,
        typer.Option(
            metavar="embedded|URL",
            help="The --redis you will give to `spo run`; by default broker.url, if it is set or a role is given.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Findings as JSON.")] = False,
    override: OverrideOption = None,
) -> None:
    """Look for problems that would keep a run from starting, and say how to fix each; exit code 2 if there are any.

    With a configuration it also tries what a start does, except loading weights: data and columns, chat template,
    tools, simulated user, reward and loss, called on the first rows. With --role it checks one process only.

    - `spo doctor`
    - `spo doctor -c my.yaml --redis embedded`
    - `spo doctor -c my.yaml --role generator -o broker.url=redis://10.0.0.5:6379/0`
    - `docker compose run --rm learner spo doctor -c /etc/spo/arithmetic.yaml --role learner`
    """
    settings = load_config(config, override or ()) if config else None
    if settings is not None and role is None:
        sys.stderr.write("trying what the processes do when they start, except loading weights\n")
    raise SystemExit(report(diagnose(settings, role, redis, logs.setup("doctor")), as_json=as_json))


def diagnose(
    settings: Config | None, role: Role | None, redis: str | None, log: Any = None
) -> dict[Role, list[Finding]]:
    """The findings about this machine and, with a configuration, about a start; see `spo.doctor`.

    `log` receives what the processes would log.
    """
    if settings is not None and redis not in (None, EMBEDDED):
        settings = changed_config(settings, {"broker.url": redis})
    if redis is None and role is None and settings is not None and "url" not in settings.broker.model_fields_set:
        redis = EMBEDDED  # as `spo run` does
    checks = [*CHECKS, *LAUNCHER_CHECKS]
    available = Need.OWN_REDIS if redis == EMBEDDED else Need.REDIS
    if settings is not None:
        available |= Need.CONFIG
        if role is None:
            available |= Need.LIBRARIES
            checks += _dry_run_checks(log or logs.to_file("doctor", Path(os.devnull)))
    machine, roles = read_machine(), [role] if role else STARTED
    return {one: examine(checks, When.DOCTOR, Context(one, machine, settings, available)) for one in roles}


def _dry_run_checks(log: Any) -> list[Check]:
    try:
        from launcher.checks.dry_run import dry_run_checks  # imports what the processes import
    except ImportError as error:
        line = f"not tried, since {error.name} is not installed here"
        return [Check("start", lambda _: warning(line), When.DOCTOR, (Role.GENERATOR,))]
    return dry_run_checks(log)


def own_redis(context: Context) -> Finding:
    return ok(f"{find_redis_server()} will be started")


def local_isolation(context: Context) -> Finding | None:
    """Check that programs which run on this machine are isolated, by trying to break out."""
    config = context.config
    if config.sandbox.url is not None or not runs_programs(config):
        return None
    from sandbox_client import make_sandbox  # imported late: they need packages that not every role has
    from sandbox_client.local import LocalSandbox

    sandbox = make_sandbox(config.sandbox)
    unbounded = sandbox.unbounded() if isinstance(sandbox, LocalSandbox) else None
    return warning(unbounded) if unbounded else ok("programs run isolated on this machine")


LAUNCHER_CHECKS = (
    Check("redis", own_redis, When.DOCTOR, needs=Need.OWN_REDIS),
    Check("sandbox", local_isolation, When.DOCTOR, (Role.GENERATOR,), Need.CONFIG),
)


def report(findings: Mapping[Role, Sequence[Finding]], *, as_json: bool = False) -> int:
    """Print the findings, those that several roles share once; returns the exit code, 2 if there is a problem."""
    roles = _by_finding(findings)
    counts = {level: sum(finding.level is level for finding in roles) for level in Level}
    if as_json:
        found = {"findings": finding_rows(findings), "problems": counts[Level.PROBLEM]}
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
    else:
        _print(roles, len(findings), counts)
    return 2 if counts[Level.PROBLEM] else 0


def finding_rows(findings: Mapping[Role, Sequence[Finding]]) -> list[dict[str, Any]]:
    """One row for each finding, with `check`, `level`, `line` and `roles`."""
    return [
        {"check": finding.name, "level": finding.level.value, "line": finding.line, "roles": [*map(str, roles)]}
        for finding, roles in _by_finding(findings).items()
    ]


def _by_finding(findings: Mapping[Role, Sequence[Finding]]) -> dict[Finding, list[Role]]:
    roles: dict[Finding, list[Role]] = {}
    for role, role_findings in findings.items():
        for finding in role_findings:
            roles.setdefault(finding, []).append(role)
    return roles


def _print(roles: Mapping[Finding, Sequence[Role]], total: int, counts: Mapping[Level, int]) -> None:
    console = Console()
    if not console.is_terminal:
        # One line per finding, never wrapped, for logs and grep.
        for finding, about in roles.items():
            sys.stdout.write("  ".join(_cells(finding, about, total)).rstrip() + "\n")
    else:
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for finding, about in roles.items():
            level, *rest = _cells(finding, about, total)
            table.add_row(Text(level, STYLES[finding.level]), *map(Text, rest))
        console.print(table)
    warnings, problems = counts[Level.WARNING], counts[Level.PROBLEM]
    sys.stdout.write(
        f"{counts[Level.OK]} ok, {warnings} warning{'s'[: warnings != 1]}, {problems} problem{'s'[: problems != 1]}\n"
    )


def _cells(finding: Finding, about: Sequence[Role], total: int) -> tuple[str, str, str]:
    roles = "" if len(about) == total else f" ({', '.join(about)})"
    # The line may quote an error message with line breaks.
    return f"{finding.level.value:7}", finding.name + roles, one_line(finding.line)
