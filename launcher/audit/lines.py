"""Runs all lines of the audit; each is a statement that must hold of a run, with what contradicts it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any

from common.config import Config
from common.errors import one_line
from launcher.audit import file_lines, journal_lines, token_lines
from launcher.audit.evidence import Evidence
from launcher.audit.records import RedisRecords, read_folder
from launcher.audit.rewards import score_again
from sampler.prompts.prompt_set import load_data

REWARDS = "each reward is the same when it is computed again"


@dataclass(frozen=True, slots=True)
class AuditLine:
    """One line of the audit: a statement, what contradicts it (empty if it holds), and a note on what was compared."""

    name: str
    problem: str
    note: str = ""

    def __str__(self) -> str:
        note = f" ({self.note})" if self.note else ""
        return one_line(f"FAILED {self.name}{note}: {self.problem}" if self.problem else f"holds  {self.name}{note}")


def audit(config: Config, redis: RedisRecords, log: Any) -> list[AuditLine]:
    """Every line of the audit of a run whose processes have ended; raises `UserError` if its data cannot be read."""
    evidence = Evidence(
        config, load_data(config.data, log), redis, read_folder(config.run.folder, config.run.keep_bytes), log
    )
    checks = journal_lines.LINES | file_lines.LINES | token_lines.LINES
    lines = [AuditLine(name, check(evidence)) for name, check in checks.items()]
    if evidence.start.commits:
        begin = f"from version {evidence.start.version} on, where the run continued without its Redis"
        lines[0] = replace(lines[0], note=begin)
    problem, note = asyncio.run(score_again(evidence))
    return [*lines, AuditLine(REWARDS, problem, note)]


def figures(redis: RedisRecords) -> dict[str, Any]:
    return {
        "commits": len(redis.journal),
        "tasks": sum(len(entry.dispatched) for entry in redis.journal),
        # By the counter, because the journal starts again if Redis came back older than the newest checkpoint.
        "samples trained on": redis.counters.get("batched", 0),
        "starts of the learner": sum(not step.metrics for step in redis.steps),
    }
