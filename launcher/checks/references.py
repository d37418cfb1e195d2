"""Tries a reward on reference answers: an answer made of the reference must score more than an empty one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from common.checks.check import Finding, problem, warning
from common.config import EpisodeConfig
from generator.rewards import Outcome, Scorer
from generator.rewards.pool import RewardFailed, WorkerDied
from generator.rewards.registry import BUILTIN
from sampler.prompts import Prompt

FAILURES = (RewardFailed, WorkerDied, TimeoutError, ValueError)
UNTRIED = {"judge", "agent"}  # rewards that call a server, or that only an agent gives
COMPARE = {"exact", "boxed", "boxed_think", "math"}  # built-in rewards that compare an answer with the reference
# In these forms a right answer is written for the reward to read.
FORMS = (
    r"\boxed{{{}}}",
    "{}",
    "<answer>{}</answer>",
    r"<think>\n</think>\n\boxed{{{}}}",
    "The answer is {}.",
    "#### {}",
)
AT_ONCE = 8  # rows
SHOWN = 5  # rows named in a line
START_ROWS = 16  # of each source, tried before a run


@dataclass(slots=True)
class Trial:
    """What came of trying a reward.

    Attributes:
        rows: how many were tried.
        raised: why the reward failed, by row.
        unmatched: the reference, by row for which no answer made of it scores more than an empty one.
        is_known: the reward is built in and compares answers, so it reads one of the `FORMS`.
    """

    rows: int = 0
    raised: dict[str, str] = field(default_factory=dict)
    unmatched: dict[str, str] = field(default_factory=dict)
    is_known: bool = False

    def findings(self, key: str) -> Iterator[Finding]:
        """A problem for what most rows have, a warning for what some have.

        Args:
            key: of the source in the configuration.
        """
        if self.raised:
            (first, reason), *_ = self.raised.items()
            others = _named(list(self.raised)[1:])
            line = f"{key}: the reward fails on {len(self.raised):,} of {self.rows:,} rows tried; {first}: {reason}"
            yield self._finding(self.raised, f"{line}{f'; also on {others}' if others else ''}")
        if self.unmatched:
            count = f"{len(self.unmatched):,} of {self.rows:,}"
            named = _named([f"{row} ({reference})" for row, reference in self.unmatched.items()])
            line = (
                f"{key}: no answer made of the reference scores more than an empty one for {count} rows tried: {named}"
            )
            if self.is_known:
                yield self._finding(self.unmatched, line)
            else:
                yield warning(f"{line}; right only if the reward ignores the reference, or wants an unusual form")

    def _finding(self, rows: Mapping[str, str], line: str) -> Finding:
        return problem(line) if 2 * len(rows) > self.rows else warning(line)


def _named(rows: Sequence[str]) -> str:
    more = f" and {len(rows) - SHOWN:,} more" if len(rows) > SHOWN else ""
    return ", ".join(rows[:SHOWN]) + more


def can_be_tried(episode: EpisodeConfig) -> bool:
    """Whether no part of the reward asks a server or an agent."""
    return UNTRIED.isdisjoint(episode.reward_weights)


def compares_only(episode: EpisodeConfig) -> bool:
    """Whether the reward is quick, and reads answers in known forms: all rows can be tried."""
    return bool(COMPARE & episode.reward_weights.keys()) and BUILTIN.keys() - {"code"} >= episode.reward_weights.keys()


async def try_references(scorer: Scorer, episode: EpisodeConfig, rows: Iterable[tuple[str, Prompt]]) -> Trial:
    """Score an empty answer and answers made of the reference, for each row; each has a name for messages."""
    trial = Trial(is_known=compares_only(episode))
    names = episode.reward_weights.keys()
    forms = FORMS if "code" not in names and (COMPARE | (names - BUILTIN.keys()) | {"reasoning_gym"}) & names else ()
    remaining = iter(rows)
    while chunk := list(islice(remaining, AT_ONCE)):
        results = await asyncio.gather(*(_try_row(scorer, episode, prompt, forms) for _, prompt in chunk))
        for (where, _), (failure, unmatched) in zip(chunk, results, strict=True):
            trial.rows += 1
            if failure:
                trial.raised[where] = failure
            elif unmatched:
                trial.unmatched[where] = unmatched
    return trial


async def _try_row(scorer: Scorer, episode: EpisodeConfig, prompt: Prompt, forms: Iterable[str]) -> tuple[str, str]:
    """Why the reward fails, and the reference if it matches nothing; each empty if that is not so."""

    async def score(text: str) -> float:
        limit = episode.max_response_tokens
        outcome = Outcome(text, response=text, answer=prompt.answer, row=prompt.row, prompt=prompt.prompt, limit=limit)
        return (await scorer.score(outcome)).value

    try:
        empty = await score("")
    except FAILURES as error:
        return f"{error} (with an empty response)", ""
    reference = Outcome("", answer=prompt.answer).answer_text.strip()
    failure, has_score = "", False
    for form in forms:
        try:
            if await score(form.format(reference)) > empty:
                return "", ""
            has_score = True
        except FAILURES as error:
            failure = failure or str(error)
    if failure and not has_score:
        return failure, ""
    return "", (repr(reference[:60]) if forms else "")
