"""The checks of a process that is about to start."""

from __future__ import annotations

from collections.abc import Callable

from common.config import Config
from common.errors import UserError
from common.preflight.adapters import adapters
from common.preflight.context import Context
from common.preflight.cpu import vllm_kernels
from common.preflight.data import data
from common.preflight.files import run_folder, secrets
from common.preflight.finding import Finding, Level
from common.preflight.gpu import gpus
from common.preflight.machine import Machine, read_machine
from common.preflight.model import model_folder
from common.preflight.published_weights import published_weights
from common.preflight.shared_memory import shared_memory
from common.preflight.steps import learner_steps
from common.preflight.trackers import trackers
from common.preflight.weight_socket import keys, port
from common.process import Role

MachineCheck = Callable[[Context], Finding | None]
RunCheck = Callable[[Context, Config], Finding | None]

MACHINE_CHECKS: tuple[MachineCheck, ...] = (vllm_kernels, gpus, shared_memory)
RUN_CHECKS: tuple[RunCheck, ...] = (
    learner_steps,
    model_folder,
    published_weights,
    adapters,
    data,
    run_folder,
    trackers,
    secrets,
    keys,
    port,
)


def check_start(role: Role, config: Config, machine: Machine | None = None) -> list[str]:
    """Check what a process of this role cannot start without.

    Returns:
        Warnings, for the log of a process that does start: one that is refused says why, and nothing else.

    Raises:
        UserError: there are problems; the message is one line with all of them.
    """
    context = Context(role, machine or read_machine(), config)
    findings = [*(check(context) for check in MACHINE_CHECKS), *(check(context, config) for check in RUN_CHECKS)]
    lines: dict[Level, list[str]] = {level: [] for level in Level}
    for finding in findings:
        if finding is not None:
            lines[finding.level].append(finding.line)
    if lines[Level.PROBLEM]:
        raise UserError("; ".join(lines[Level.PROBLEM]))
    return lines[Level.WARNING]
