"""Tries a reward on reference answers: one made of the reference must score the most, and an empty one the least."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from common.checks.check import Finding, ok, problem, warning
from common.config import Config, EpisodeConfig
from generator.rewards import Outcome, Scorer
from generator.rewards.pool import RewardFailed, WorkerDied
from generator.rewards.registry import BUILTIN
from generator.rewards.rules import last_boxed
from sampler.prompts.prompt_set import Prompt

FAILURES = (RewardFailed, WorkerDied, TimeoutError, ValueError)
UNTRIED = {
    "judge": "it would ask a server",
    "agent": "only an agent gives it",
    "container": "tests in a container give it",
}
COMPARE = {"exact", "boxed", "boxed_think", "math"}  # built-in rewards that compare an answer with the reference
# Forms in which a reward may read a right answer; {} is the reference.
FORMS = (
    r"\boxed{{}}",
    "{}",
    "<answer>{}</answer>",
    "<think>\n</think>\n\\boxed{{}}",
    "The answer is {}.",
    "#### {}",
    "Answer: {}",
    "<think>\n</think>\n<answer>\n{}\n</answer>",
    "```\n{}\n```",
)
AT_ONCE = 8  # rows
MAX_NAMED = 5  # rows that a message names
START_ROWS = 16  # of each source, tried before a run
EITHER = "this is right only if the reward ignores the reference (then set data.answer_column: null)"


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of the answers that were tried on one row."""

    where: str  # the row's name in messages
    reference: str  # as messages show it
    empty: float  # score of an empty answer
    right: float  # highest score of an answer made of the row's reference
    wrong: float | None  # score of another row's reference in the form of `right`; None if all references are the same
    least: float  # lowest of these scores
    failure: str  # the reward's error on an answer in another form, with that answer; empty if there was none

    @property
    def shown(self) -> str:
        return f"{self.where} ({self.reference})"


@dataclass(slots=True)
class Trial:
    """The results of trying a reward on rows."""

    is_known: bool  # the reward is built in and compares answers, so it reads one of the `FORMS`
    right_from: float  # lowest reward with which an answer counts as right
    rows: int = 0  # number of rows tried
    raised: dict[str, str] = field(default_factory=dict)  # the reward's error, by row
    scores: list[Scores] = field(default_factory=list)  # of the rows whose references were compared

    def findings(self, key: str) -> Iterator[Finding]:
        """Findings: a problem if most rows show it and no other form of answer could explain it, else a warning."""
        if self.raised:
            first, *others = self.raised
            also = f"; also on {_named(others)}" if others else ""
            line = f"{key}: the reward fails on {self._share(self.raised)}; {first}: {self.raised[first]}{also}"
            yield self._finding(self.raised, line)
        # A reward that is the same for every answer may be intended.
        silent = [row for row in self.scores if row.least < row.empty and self.right_from <= row.empty]
        if silent:
            what = f"an empty answer counts as right (reward {silent[0].empty:g}), and others score less"
            yield self._finding(silent, f"{key}: {what}, for {self._rows(silent)}")
        unmatched = [row for row in self.scores if row.right <= row.empty and row not in silent]
        if unmatched:
            line = f"{key}: no answer made of the reference scores more than an empty one for {self._rows(unmatched)}"
            yield (
                self._finding(unmatched, line) if self.is_known else warning(f"{line}; {EITHER}, or needs another form")
            )
        failed = [row for row in self.scores if row.failure]
        if failed:
            yield warning(f"{key}: the reward fails on some answers, {self._rows(failed)}: {failed[0].failure}")
        matched = [row for row in self.scores if row.empty < row.right]
        yield from self._doubts(key, matched)

    def _doubts(self, key: str, matched: Sequence[Scores]) -> Iterator[Finding]:
        """Warnings about rows for which an answer made of the reference scores more than an empty one."""
        low = [row for row in matched if row.right < self.right_from]
        if low:
            most = max(row.right for row in low)
            yield warning(
                f"{key}: an answer made of the reference scores at most {most:g} for {self._rows(low)}, which does not "
                f"count as right in evaluations: set eval.right_from, now {self.right_from:g}, if none can score more"
            )
        alike = [row for row in matched if row.wrong is not None and row.right <= row.wrong]
        if self._are_most(alike):
            yield warning(
                f"{key}: another row's reference scores as much as the row's own for {self._rows(alike)}; {EITHER}"
            )

    def _rows(self, rows: Sequence[Scores]) -> str:
        return f"{self._share(rows)}: {_named([row.shown for row in rows])}"

    def _share(self, rows: Collection[object]) -> str:
        return f"{len(rows):,} of {self.rows:,} rows tried"

    def _are_most(self, rows: Collection[object]) -> bool:
        return 2 * len(rows) > self.rows

    def _finding(self, rows: Collection[object], line: str) -> Finding:
        return problem(line) if self._are_most(rows) else warning(line)


def _named(rows: Sequence[str]) -> str:
    more = f" and {len(rows) - MAX_NAMED:,} more" if len(rows) > MAX_NAMED else ""
    return ", ".join(rows[:MAX_NAMED]) + more


def not_tried(episode: EpisodeConfig, key: str) -> Finding | None:
    """A finding about the part of a source's reward that is not tried; None if all of it is."""
    names = episode.reward_weights.keys()
    for name, why in UNTRIED.items():
        if name in names:
            return ok(f"{key}: the reward is not tried on references, since {name!r} is a part of it: {why}")
    return ok(f"{key}: for 'code' only the tests are read; no program is run") if "code" in names else None


def can_be_tried(episode: EpisodeConfig) -> bool:
    """Whether no part of the reward asks a server or an agent."""
    return UNTRIED.keys().isdisjoint(episode.reward_weights)


def compares_only(episode: EpisodeConfig) -> bool:
    """Whether the reward only compares answers, in known forms: it is quick, so all rows can be tried."""
    return bool(COMPARE & episode.reward_weights.keys()) and BUILTIN.keys() - {"code"} >= episode.reward_weights.keys()


async def try_references(scorer: Scorer, config: Config, rows: Iterable[tuple[str, Prompt]]) -> Trial:
    """Score for each row an empty answer, answers made of its reference, and one made of another row's reference."""
    trial = Trial(compares_only(config.episode), config.right_from)
    forms = _forms(config.episode)
    remaining = iter(rows)
    while chunk := list(islice(remaining, AT_ONCE)):
        prompts = [prompt for _, prompt in chunk]
        results = await asyncio.gather(
            *(_TriedRow(scorer, config, where, prompt).scores(forms, prompts) for where, prompt in chunk),
            return_exceptions=True,
        )
        trial.rows += len(chunk)
        for (where, _), result in zip(chunk, results, strict=True):
            if isinstance(result, FAILURES):
                trial.raised[where] = str(result)
            elif isinstance(result, BaseException):
                raise result
            elif result is not None:
                trial.scores.append(result)
    return trial


class _TriedRow:
    """A row, and the scorer of the answers that are tried on it."""

    def __init__(self, scorer: Scorer, config: Config, where: str, prompt: Prompt) -> None:
        self.scorer, self.where, self.prompt = scorer, where, prompt
        self.limit, self.most = config.episode.max_response_tokens, config.sampler.tracker.reward_range[1]

    async def scores(self, forms: Sequence[str], others: Sequence[Prompt]) -> Scores | None:
        """None if nothing is compared with the row's reference. Raises `FAILURES`."""
        try:
            empty = await self._score("")
        except FAILURES as error:
            raise ValueError(f"{error} (with an empty response)") from None
        reference = _texts(self.prompt)
        if not forms or not reference:
            return None
        scores: dict[tuple[str, str], float] = {}
        failure = ""
        for form in forms:
            for text in reference:
                answer = form.replace("{}", text)
                try:
                    scores[form, text] = await self._score(answer)
                except FAILURES as error:
                    failure = failure or f"{error} (with the answer {answer[:60]!r})"
            if self.most in scores.values():  # no other form can score more
                break
        if not scores:
            raise ValueError(failure)
        form, text = max(scores, key=scores.__getitem__)
        wrong = await self._wrong(form, reference, others)
        values = [empty, *scores.values(), *([] if wrong is None else [wrong])]
        return Scores(self.where, repr(reference[0][:60]), empty, scores[form, text], wrong, min(values), failure)

    async def _wrong(self, form: str, reference: Sequence[str], others: Sequence[Prompt]) -> float | None:
        """The score of another row's reference in a form; None if all references are the same, or the reward fails."""
        for other in others:
            texts = _texts(other)
            if texts and not {*texts} & {*reference}:
                try:
                    return await self._score(form.replace("{}", texts[-1]))
                except FAILURES:
                    return None
        return None

    async def _score(self, text: str) -> float:
        row = self.prompt
        outcome = Outcome(text, text, row.answer, row.row, row.prompt, limit=self.limit)
        return (await self.scorer.score(outcome)).value


def _texts(prompt: Prompt) -> list[str]:
    """A row's reference, and the answer within it if it is a solution (GSM8K, MATH); empty if there is none."""
    if prompt.answer is None:
        return []
    text = Outcome("", answer=prompt.answer).answer_text.strip()
    if isinstance(prompt.answer, list) and len(prompt.answer) == 1:
        within = Outcome("", answer=prompt.answer[0]).answer_text
    else:
        within = text.rpartition("####")[2] if "####" in text else last_boxed(text) or ""
    return list(dict.fromkeys(filter(None, [text, within.strip()])))


def _forms(episode: EpisodeConfig) -> list[str]:
    """Forms of answers for the reward to read; none if no part of it compares them with a reference."""
    names = episode.reward_weights.keys()
    if "code" in names or not (COMPARE | (names - BUILTIN.keys()) | {"reasoning_gym"}) & names:
        return []
    named = [form for name in names for option in episode.reward_options.get(name, {}).values() for form in _of(option)]
    return list(dict.fromkeys([*FORMS, *named]))


def _of(option: Any) -> list[str]:
    """Forms that a reward's option names: tags in their order, a tag, or words before the answer."""
    if isinstance(option, list) and option and all(isinstance(tag, str) for tag in option):
        *begin, end = option
        return [
            f"{''.join(begin)}{{}}{end}",
            rf"{''.join(begin)}\boxed{{{{}}}}{end}",
            rf"{''.join(option)}\boxed{{{{}}}}",
        ]
    if not isinstance(option, str) or not option:
        return []
    tag = option.strip("<>/")
    return [option] if "{}" in option else [f"{option} {{}}", f"<{tag}>{{}}</{tag}>"]
