"""What the processes of a run check when they start, checked before any of them is started."""

from __future__ import annotations

from common.config import Config
from common.errors import UserError
from common.preflight.context import Context
from common.preflight.finding import Level
from common.preflight.machine import read_machine
from common.preflight.packages import packages
from common.preflight.start import check_start
from common.process import Role


def check_processes(config: Config) -> None:
    """Raise `UserError` for what would keep a process from starting and is seen without loading anything."""
    machine = read_machine()
    for role in (Role.SAMPLER, Role.GENERATOR, Role.LEARNER):
        # The process logs the warnings itself.
        check_start(role, config, machine)
        installed = packages(Context(role, machine, config))
        if installed.level is Level.PROBLEM:
            raise UserError(installed.line)
