"""The audit of a run's books, as `spo chaos` makes it at the end."""

from __future__ import annotations

import structlog

from common.config import Config
from sampler.prompt_traits import prompt_traits
from sampler.prompts import load_data
from sampler.tracker import ValueTracker
from tests.chaos.audit import Books, audit


def audited(books: Books, config: Config) -> dict[str, str]:
    """Every line of the audit, and what is wrong with it; empty where it holds."""
    log = structlog.get_logger()
    data, sampler = load_data(config.data, log), config.sampler
    traits = prompt_traits(data.train, sampler.tracker, log)
    tracker = ValueTracker(data.train.ids, sampler.tracker, sampler.selection, traits)
    return {check.name: check.problem for check in audit(books, tracker, config.run.steps)}
