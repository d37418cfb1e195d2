"""Checks before a start that teachers have the policy's vocabulary: scores of other tokens would mean nothing."""

from __future__ import annotations

from collections.abc import Iterator

from common.checks.check import Context, Finding, ok
from common.config import Config
from generator.teacher.vocabulary import check_vocabulary


def check_vocabularies(config: Config) -> None:
    """Raise `UserError` if a `teacher.model` has another vocabulary; a generator asks the server of a `teacher.url`."""
    for teacher in config.served_teachers().values():
        check_vocabulary(config.model.path, str(teacher.model), config.model.trust_remote_code)


def vocabularies(context: Context) -> Iterator[Finding]:
    """The same check, with a line for each teacher that fits."""
    check_vocabularies(context.config)
    for teacher in context.config.served_teachers().values():
        yield ok(f"{teacher.model} has the policy's tokens")
