"""The list of checks, and the functions that run them before a process or a run starts.

The launcher adds checks of its own (`launcher/checks/`).
"""

from __future__ import annotations

from common.checks.check import (
    COMPUTING,
    IN_A_RUN,
    STARTED,
    Check,
    Context,
    Level,
    Need,
    When,
    examine,
    refuse_problems,
)
from common.checks.computing import gpus, open_files, processor, shared_memory, threads
from common.checks.machine import Machine, read_machine
from common.checks.model import adapters, critic, disk, memory, model, published_weights, teachers
from common.checks.packages import packages, python, torch_relatives, trackers
from common.checks.run import data, keys, learner_steps, port, run_folder, secrets, settings
from common.checks.services import redis, sandbox, teacher_servers
from common.config import Config
from common.process import Role

DOCTOR = When.DOCTOR
# What refuses a process at its start also makes `spo run` refuse, before it starts any process.
ALWAYS = When.START | When.RUN | When.DOCTOR
GENERATOR, LEARNER, SAMPLER, RELAY = (Role.GENERATOR,), (Role.LEARNER,), (Role.SAMPLER,), (Role.RELAY,)

CHECKS: tuple[Check, ...] = (
    Check("python", python, DOCTOR),
    Check("packages", packages, DOCTOR | When.RUN),
    Check("torchvision", torch_relatives, DOCTOR),
    Check("processor", processor, ALWAYS, COMPUTING),
    Check("gpus", gpus, ALWAYS, COMPUTING),
    Check("shared memory", shared_memory, ALWAYS, COMPUTING),
    Check("threads", threads, DOCTOR, COMPUTING),
    Check("open files", open_files, DOCTOR),
    Check("redis", redis, DOCTOR, IN_A_RUN, Need.CONFIG | Need.REDIS),
    Check("steps", learner_steps, ALWAYS, SAMPLER + LEARNER + RELAY, Need.CONFIG),
    Check("memory", memory, DOCTOR, COMPUTING, Need.CONFIG),
    Check("model", model, ALWAYS, GENERATOR + LEARNER, Need.CONFIG),
    Check("critic", critic, ALWAYS, LEARNER, Need.CONFIG),
    Check("published weights", published_weights, ALWAYS, LEARNER, Need.CONFIG),
    Check("adapter", adapters, ALWAYS, GENERATOR, Need.CONFIG),
    Check("teacher", teachers, When.RUN | When.DOCTOR | When.DRY_RUN, GENERATOR, Need.CONFIG),
    Check("teacher server", teacher_servers, DOCTOR, GENERATOR, Need.CONFIG),
    Check("data", data, ALWAYS, SAMPLER, Need.CONFIG),
    Check("output", run_folder, ALWAYS, SAMPLER + COMPUTING, Need.CONFIG),
    Check("disk", disk, DOCTOR, LEARNER, Need.CONFIG),
    Check("trackers", trackers, ALWAYS, SAMPLER, Need.CONFIG),
    Check("secrets", secrets, ALWAYS, IN_A_RUN, Need.CONFIG),
    Check("keys", keys, ALWAYS, GENERATOR + LEARNER + RELAY, Need.CONFIG),
    Check("weights port", port, ALWAYS, LEARNER, Need.CONFIG),
    Check("sandbox", sandbox, DOCTOR, GENERATOR, Need.CONFIG),
    # Not at a start: each process logs these warnings itself.
    Check("settings", settings, DOCTOR | When.DRY_RUN, LEARNER, Need.CONFIG),
)


def check_start(role: Role, config: Config, machine: Machine | None = None) -> list[str]:
    """Check what a process of this role cannot start without; returns warnings for the log.

    Raises:
        UserError: there are problems; the message is one line with all of them.
    """
    findings = examine(CHECKS, When.START, Context(role, machine or read_machine(), config))
    refuse_problems(findings)
    return [finding.line for finding in findings if finding.level is Level.WARNING]


def check_run(config: Config) -> None:
    """Raise `UserError` for what would keep a process of `spo run` from starting, before any is started."""
    machine = read_machine()
    for role in STARTED:
        refuse_problems(examine(CHECKS, When.RUN, Context(role, machine, config)))
