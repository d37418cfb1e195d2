"""Which checks there are, and for whom: all of them for `spo doctor`, the quick ones before a process starts."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from typing import Any

from common.config import Config
from common.doctor.case import Case
from common.doctor.cpu import kernels, threads
from common.doctor.files import data, disk, open_files, output, secrets
from common.doctor.finding import Finding, Level, ok
from common.doctor.gpu import gpus
from common.doctor.machine import Machine, read_machine
from common.doctor.memory import memory, shared_memory
from common.doctor.model import model
from common.doctor.packages import packages, python, torch_relatives
from common.doctor.queue import queue
from common.doctor.sandbox import sandbox
from common.doctor.weights import keys, port
from common.errors import UserError
from common.role import Role

OfMachine = Callable[[Case], Finding | None]
OfRun = Callable[[Case, Config], Finding | None]

# Each says itself which roles it is about.
MACHINE: tuple[OfMachine, ...] = (
    python,
    packages,
    torch_relatives,
    kernels,
    gpus,
    shared_memory,
    threads,
    open_files,
)
RUN: tuple[OfRun, ...] = (memory, model, data, output, disk, secrets, keys, port)
# What would otherwise end in a traceback, in a signal, or after minutes: they take milliseconds and wait for nobody.
AT_START: tuple[OfMachine, ...] = (kernels, gpus, shared_memory)
AT_START_OF_RUN: tuple[OfRun, ...] = (output, secrets, keys, port)


def examine(role: Role, config: Config | None, machine: Machine, *, own_redis: bool = False) -> list[Finding]:
    """Everything that can be said about a process before it starts.

    Args:
        config: its run's; without one only the machine is looked at.
        own_redis: whether the run is to start a Redis of its own, so that there is none to look at.
    """
    case = Case(role, machine, config)
    found = [finding for check in MACHINE if (finding := check(case))]
    if config is None or role is Role.SANDBOX:
        return found
    about = {check: check(case, config) for check in RUN}
    if not own_redis:
        queued, broker = queue(config)
        found += queued
        taken = about[port]
        if broker is not None and taken is not None and taken.level is Level.PROBLEM and _learner_here(broker):
            about[port] = ok(taken.name, f"{config.learner.weights.bind} is served by this run's learner")
    found += [finding for finding in about.values() if finding]
    server = sandbox(case, config)
    return [*found, server] if server else found


def refuse(role: Role, config: Config, log: Any, machine: Machine | None = None) -> None:
    """Look, before anything is loaded or waited for, at what a process of this role cannot start without.

    Warnings go to the log.

    Raises:
        UserError: with the line of every problem.
    """
    case = Case(role, machine or read_machine(), config)
    found: Iterable[Finding | None] = [
        *(check(case) for check in AT_START),
        *(check(case, config) for check in AT_START_OF_RUN),
    ]
    problems = []
    for finding in found:
        if finding is not None and finding.level is Level.WARNING:
            log.warning(finding.line)
        elif finding is not None and finding.level is Level.PROBLEM:
            problems.append(finding.line)
    if problems:
        raise UserError("; ".join(problems))


def _learner_here(broker: Any) -> bool:
    here = socket.gethostname()
    return any(told["role"] == "learner" and told["host"] == here for told in broker.processes().values())
