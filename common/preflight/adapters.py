"""How a generator computes with an adapter (`learner.lora.serve`), and what that costs where it runs."""

from __future__ import annotations

from common.config import Config
from common.preflight.context import Context
from common.preflight.finding import Finding, warning
from common.preflight.gpu import cpu_build
from common.process import Role


def adapters(context: Context, config: Config) -> Finding | None:
    """Whether vLLM has kernels for adapters here."""
    lora = config.learner.lora
    build = cpu_build(Role.GENERATOR)
    if context.role is not Role.GENERATOR or lora is None or lora.serve == "merged" or build is None:
        return None
    return warning(
        "adapter",
        f"{build} computes adapters without kernels of their own: generation takes twice as long, or longer; set "
        "learner.lora.serve=merged",
    )
