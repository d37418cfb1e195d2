"""Whether teachers have the policy's tokens, before anything is started: scores of other tokens would mean nothing."""

from __future__ import annotations

from common.checks.check import Context, Finding, ok
from common.config import Config
from generator.teacher.vocabulary import check_vocabulary


def check_vocabularies(config: Config) -> None:
    """Raise `UserError` for a teacher that `spo-teacher` would refuse; what a server has only it knows."""
    for teacher in config.teachers_in_use().values():
        if teacher.model is not None and config.run.has_learner:
            check_vocabulary(config.model.path, teacher.model, config.model.trust_remote_code)


def vocabulary(context: Context) -> Finding | None:
    """The same check of one teacher, with a line for one that fits."""
    config, name = context.config, context.config.teacher.model
    if name is None:
        return None
    check_vocabulary(config.model.path, name, config.model.trust_remote_code)
    return ok(f"{name} has the policy's tokens")
