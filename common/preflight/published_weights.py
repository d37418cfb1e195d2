"""The memory in which the learner keeps the weights that it serves."""

from __future__ import annotations

from pathlib import Path

from common.config import Config
from common.model import model_size
from common.preflight.context import Context, format_bytes
from common.preflight.finding import Finding, ok, problem
from common.process import Role

VERSIONS = 2  # one is served while the next is written


def published_weights(context: Context, config: Config) -> Finding | None:
    """Whether the shared memory of the published versions fits into the machine or container at all."""
    size = model_size(Path(config.model.path)) if context.role is Role.LEARNER else None
    # Of several ranks, rank 0 serves the weights. An adapter is small.
    if size is None or config.learner.lora is not None or context.machine.environ.get("RANK", "0") != "0":
        return None
    name, available = "published weights", context.machine.memory
    needed = VERSIONS * size.parameters * (4 if config.model.dtype == "float32" else 2)
    line = f"{VERSIONS} versions of the weights take {format_bytes(needed)} of shared memory"
    if needed <= available:
        return ok(name, line)
    limit = "the container's limit is" if context.machine.memory_limited else "this machine has"
    return problem(name, f"{line}, and {limit} {format_bytes(available)}: raise the limit, or train a smaller model")
