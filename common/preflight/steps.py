"""A process that trains, or that serves one, needs learner steps to do it in."""

from __future__ import annotations

from common.config import Config
from common.preflight.context import Context
from common.preflight.finding import Finding, problem
from common.process import Role


def learner_steps(context: Context, config: Config) -> Finding | None:
    """Whether the run has a learner, where this process needs one."""
    if config.run.has_learner or context.role in (Role.GENERATOR, Role.SANDBOX):
        return None
    return problem(
        "steps",
        f"run.steps = 0 is a run without a learner, in which there is no work for a {context.role}; set it to 1 or "
        "more, or use `spo values estimate` or `spo eval`, which need generators only",
    )
