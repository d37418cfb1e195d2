"""Which checks `spo doctor` makes for a process."""

from __future__ import annotations

import socket

from common.config import Config
from common.preflight.adapters import adapters
from common.preflight.context import Context
from common.preflight.cpu import vllm_kernels
from common.preflight.data import data
from common.preflight.files import run_folder, secrets
from common.preflight.finding import Finding, Level, ok
from common.preflight.gpu import gpus
from common.preflight.machine import Machine
from common.preflight.packages import packages, python, torch_relatives
from common.preflight.published_weights import published_weights
from common.preflight.shared_memory import shared_memory
from common.preflight.start import MachineCheck, RunCheck
from common.preflight.steps import learner_steps
from common.preflight.trackers import trackers
from common.preflight.weight_socket import keys, port
from common.process import Role
from common.streams.broker import Broker
from launcher.doctor.limits import open_files, threads
from launcher.doctor.model import disk, memory, model
from launcher.doctor.redis_server import check_redis
from launcher.doctor.sandbox import sandbox

MACHINE_CHECKS: tuple[MachineCheck, ...] = (
    python,
    packages,
    torch_relatives,
    vllm_kernels,
    gpus,
    shared_memory,
    threads,
    open_files,
)
RUN_CHECKS: tuple[RunCheck, ...] = (
    learner_steps, memory, published_weights, model, adapters, data, run_folder, disk, trackers, secrets, keys, port,
    sandbox,
)  # fmt: skip


def examine(role: Role, config: Config | None, machine: Machine, *, embedded_redis: bool = False) -> list[Finding]:
    """All findings about a process that is to start.

    Args:
        config: the run's configuration; without it only the machine is checked.
        embedded_redis: whether the run starts a Redis of its own, so that there is none to check yet.
    """
    context = Context(role, machine, config)
    findings = [finding for check in MACHINE_CHECKS if (finding := check(context))]
    if config is None or role is Role.SANDBOX:
        return findings
    broker = None
    if not embedded_redis:
        redis_findings, broker = check_redis(config)
        findings += redis_findings
    for check in RUN_CHECKS:
        finding = check(context, config)
        if check is port and finding and finding.level is Level.PROBLEM and broker and _learner_is_here(broker):
            finding = ok(finding.name, f"{config.learner.weights.bind} is served by this run's learner")
        if finding:
            findings.append(finding)
    return findings


def _learner_is_here(broker: Broker) -> bool:
    host = socket.gethostname()
    return any(process["role"] == "learner" and process["host"] == host for process in broker.processes().values())
