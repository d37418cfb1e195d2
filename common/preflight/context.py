"""What a check knows: which process is to start, on which machine, with which configuration."""

from __future__ import annotations

import math
from dataclasses import dataclass

from common.config import Config
from common.preflight.machine import Machine
from common.process import Role

PARALLEL_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


@dataclass(frozen=True, slots=True)
class Context:
    """One process that is to start.

    Attributes:
        config: the run's configuration; None where only the machine is checked.
    """

    role: Role
    machine: Machine
    config: Config | None = None

    def ranks(self) -> int:
        """Processes on this machine that compute one model together: vLLM's workers, or the learner's ranks."""
        if self.role is Role.LEARNER:
            environ = self.machine.environ
            # Set by torchrun, or by DeepSpeed's launcher.
            return parse_count(environ.get("LOCAL_WORLD_SIZE") or environ.get("LOCAL_SIZE") or "1") or 1
        if self.role is not Role.GENERATOR:
            return 1
        return math.prod(self.parallel_sizes().values())

    def parallel_sizes(self) -> dict[str, int]:
        """The parallel sizes of vLLM that the configuration sets, by name."""
        engine = self.config.generator.engine if self.config else {}
        return {name: size for name in PARALLEL_SIZES if isinstance(size := engine.get(name), int) and size > 0}


def parse_count(text: str) -> int | None:
    """A whole number of 0 or more, or None."""
    return int(text) if text.isascii() and text.isdecimal() else None


def format_bytes(size: float) -> str:
    """A number of bytes in MiB or GiB."""
    return f"{size / (1 << 30):.1f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.0f} MiB"
