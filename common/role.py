"""The kinds of process that take part in a run."""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    """The processes of a run, and the sandbox."""

    SAMPLER = "sampler"
    GENERATOR = "generator"
    LEARNER = "learner"
    RELAY = "relay"
    SANDBOX = "sandbox"
