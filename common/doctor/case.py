"""What checks are given: which process, where, and with which configuration."""

from __future__ import annotations

import math
from dataclasses import dataclass

from common.config import Config
from common.doctor.machine import Machine
from common.role import Role

PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


@dataclass(frozen=True, slots=True)
class Case:
    """One process that is to run.

    Attributes:
        config: of its run; None where only the machine is looked at.
    """

    role: Role
    machine: Machine
    config: Config | None = None

    def ranks(self) -> int:
        """Processes on this machine that compute one model together: vLLM's workers, the learner's ranks."""
        if self.role is Role.LEARNER:
            environ = self.machine.environ
            # As torchrun says it, or as DeepSpeed's launcher does.
            return whole(environ.get("LOCAL_WORLD_SIZE") or environ.get("LOCAL_SIZE") or "1") or 1
        if self.role is not Role.GENERATOR or self.config is None:
            return 1
        return math.prod(self.parallel().values())

    def parallel(self) -> dict[str, int]:
        """How vLLM spreads the model: those sizes that the configuration names."""
        engine = self.config.generator.engine if self.config else {}
        return {name: size for name in PARALLEL if isinstance(size := engine.get(name), int) and size > 0}


def whole(text: str) -> int | None:
    """A whole number of 0 or more, or None."""
    return int(text) if text.isascii() and text.isdecimal() else None


def mib(size: float) -> str:
    """Bytes for people."""
    return f"{size / (1 << 30):.1f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.0f} MiB"
