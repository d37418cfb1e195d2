"""A check: which processes it is for, when it runs, what it needs, and its findings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Flag, StrEnum, auto
from typing import Any

from common.checks.machine import Machine, parse_count
from common.config import Config
from common.errors import UserError
from common.process import Role

PARALLEL_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


class Level(StrEnum):
    """How serious a finding is: a process starts despite warnings, and does not start with a problem."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    level: Level
    line: str  # for a warning or a problem, it also says how to fix it
    name: str = ""  # two words at most; by default the check's


def ok(line: str, name: str = "") -> Finding:
    return Finding(Level.OK, line, name)


def warning(line: str, name: str = "") -> Finding:
    return Finding(Level.WARNING, line, name)


def problem(line: str, name: str = "") -> Finding:
    return Finding(Level.PROBLEM, line, name)


class When(Flag):
    START = auto()  # each process, before it loads or waits for anything
    RUN = auto()  # `spo run`, before it starts its processes
    DOCTOR = auto()
    DRY_RUN = auto()
    DATA = auto()  # `spo data check`, which reads every row


class Need(Flag):
    """What a check needs beside the machine."""

    NOTHING = 0
    CONFIG = auto()
    REDIS = auto()  # the server that `broker.url` names
    OWN_REDIS = auto()  # a server that `spo run` starts
    LIBRARIES = auto()  # everything that the processes import: vLLM, torch, the code of users


@dataclass(frozen=True)
class Context:
    """A process that is about to start, and its machine."""

    role: Role
    machine: Machine
    run_config: Config | None = None  # None if only the machine is checked
    available: Need = Need.CONFIG  # the needs that are met here

    @property
    def config(self) -> Config:
        """The run's configuration, for checks that need one."""
        assert self.run_config is not None
        return self.run_config

    @property
    def ranks(self) -> int:
        """Processes on this machine that compute one model together: vLLM's workers, or the learner's ranks."""
        if self.role is Role.LEARNER:
            environ = self.machine.environ
            # Set by torchrun, or by DeepSpeed's launcher.
            return parse_count(environ.get("LOCAL_WORLD_SIZE") or environ.get("LOCAL_SIZE") or "1") or 1
        return math.prod(self.parallel_sizes.values()) if self.role is Role.GENERATOR else 1

    @property
    def engine(self) -> Mapping[str, Any]:
        """The arguments of this process's engine that the configuration sets."""
        return {} if self.run_config is None else self.run_config.generator.engine

    @property
    def parallel_sizes(self) -> dict[str, int]:
        """The parallel sizes of vLLM that the configuration sets, by name."""
        return {name: size for name in PARALLEL_SIZES if isinstance(size := self.engine.get(name), int) and size > 0}

    @property
    def serves_weights(self) -> bool:
        """Whether this process is the learner's rank 0."""
        return self.role is Role.LEARNER and self.machine.environ.get("RANK", "0") == "0"


Findings = Finding | Iterable[Finding] | None
COMPUTING = (Role.GENERATOR, Role.LEARNER)
IN_A_RUN = (Role.SAMPLER, Role.GENERATOR, Role.LEARNER, Role.RELAY)
STARTED = (Role.SAMPLER, Role.GENERATOR, Role.LEARNER)  # by `spo run`


@dataclass(frozen=True, slots=True)
class Check:
    """One entry of the list."""

    name: str
    # Returns None if the check does not apply; a `UserError` that it raises is a problem.
    find: Callable[[Context], Findings]
    when: When
    roles: Sequence[Role] = tuple(Role)
    needs: Need = Need.NOTHING

    def findings(self, context: Context) -> list[Finding]:
        try:
            result = self.find(context)
            results = [result] if isinstance(result, Finding) else list(result or ())
        except UserError as error:
            results = [problem(str(error))]
        except Exception as error:
            if Need.LIBRARIES not in self.needs:
                raise
            # The error comes from a user's own tool, reward or model code.
            results = [problem(f"{type(error).__name__}: {error}")]
        return [replace(finding, name=finding.name or self.name) for finding in results]


def examine(checks: Iterable[Check], when: When, context: Context) -> list[Finding]:
    """Run the checks for this moment and this process whose needs are met; returns all findings."""
    return [
        finding
        for check in checks
        if check.when & when and context.role in check.roles and check.needs in context.available
        for finding in check.findings(context)
    ]


def refuse_problems(findings: Iterable[Finding]) -> None:
    """Raise `UserError` with all problems in one line, if there are any."""
    problems = [finding.line for finding in findings if finding.level is Level.PROBLEM]
    if problems:
        raise UserError("; ".join(problems))
