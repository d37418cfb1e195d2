"""The health check of a container: whether a process on this host takes part in its run.

    python -m common.health generator --config run.yaml

Exit code 0 if a process of that role on this host has a heartbeat that is not too old, else 1 with one line.
"""

from __future__ import annotations

import socket
import sys
from typing import Annotated

import typer

from common.config import Config, load_config
from common.errors import UserError
from common.process import Role
from common.scripts import ConfigOption, OverrideOption, entry_point
from common.streams.broker import connect

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
HEARTBEATS = (Role.SAMPLER, Role.GENERATOR, Role.LEARNER)


@app.command()
def health(
    role: Annotated[Role, typer.Argument(help="sampler, generator or learner.")],
    config: ConfigOption,
    override: OverrideOption = None,
) -> None:
    """Exit with 0 if this host's process of a role is alive, else with 1 and one line.

    python -m common.health generator -c my.yaml
    """
    if role not in HEARTBEATS:
        raise UserError(f"a {role.value} has no heartbeat; give one of {', '.join(HEARTBEATS)}")
    settings = load_config(config, override or ())
    if not alive(settings, role, socket.gethostname()):
        sys.stderr.write(f"no {role.value} of run {settings.run.name!r} on this host has a heartbeat\n")
        raise SystemExit(1)


def alive(config: Config, role: Role, host: str) -> bool:
    """True if a process of this role on this host has sent a heartbeat within `broker.dead_after` seconds."""
    broker = connect(config.broker.model_copy(update={"wait": 0.0}), config.run.name)
    return any(process["role"] == role.value and process["host"] == host for process in broker.processes().values())


main = entry_point(app)

if __name__ == "__main__":
    main()
