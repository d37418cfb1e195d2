"""A report on the rows of one source: how many can be used, what is wrong with the others, lengths and answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from common.answers import answer_kind, answer_text, are_mixed
from common.config import Config, Source
from common.errors import UserError, one_line, visible
from sampler.prompts.chat import Messages
from sampler.prompts.hints import Hints
from sampler.prompts.prompt_set import check_rows, missing_columns, prompt_hash
from sampler.prompts.row import BadRow, CheckedRow, Rows
from sampler.prompts.rows import open_source

SHOWN = 1000  # characters of each end of an example
# Shows progress over rows: `track(rows, how many, what)`.
Track = Callable[[Iterable[Any], int, str], Iterable[Any]]


@dataclass(slots=True)
class Lengths:
    min: int
    median: float
    p95: float
    max: int

    @classmethod
    def of(cls, values: list[int]) -> Lengths | None:
        """None if there are no values."""
        if not values:
            return None
        median, p95 = np.percentile(values, [50, 95]).tolist()
        return cls(min(values), median, p95, max(values))


@dataclass(slots=True)
class Occurrences:
    """How often something occurs, and where it occurs first."""

    count: int = 0
    first: str = ""

    def add(self, where: str) -> None:
        self.count += 1
        self.first = self.first or where


@dataclass(frozen=True, slots=True)
class Example:
    """A usable row."""

    where: str
    prompt: str  # as the model sees it, decoded; without a tokenizer, as it is in the data
    answer: str  # the reference; empty if there is none


@dataclass(slots=True)
class SourceReport:
    """The report on one source."""

    key: str  # of the source in the configuration
    data: str  # what is read
    problem: str = ""  # why no row can be used; empty if some can
    rows: int = 0
    usable: int = 0
    # How many rows cannot be used, by kind: `unreadable`, `prompt`, `answer`, `id`, `duplicate`, `template`.
    problems: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, Occurrences] = field(default_factory=dict)  # the same by error message
    answers: dict[str, Occurrences] = field(default_factory=dict)  # usable rows by the kind of their answer
    columns: dict[str, int] = field(default_factory=dict)  # how many rows have each column
    characters: Lengths | None = None
    tokens: Lengths | None = None
    too_long: int | None = None  # prompts with more than `data.max_prompt_tokens`; None if tokens are not counted
    # Of the usable rows: id column, id, hash of the prompt; column and hash are None if the id is the hash.
    ids: set[tuple[str | None, str, str | None]] = field(default_factory=set)
    hints: list[str] = field(default_factory=list)  # what was probably not meant, with the setting that helps
    examples: list[Example] = field(default_factory=list)  # the first usable rows

    @property
    def mixed(self) -> bool:
        """Whether no reward can compare all answers, since their types differ."""
        return are_mixed(self.answers)


@dataclass
class Rendered:
    """Counts of prompts that were rendered."""

    lengths: list[int] = field(default_factory=list)  # tokens of each prompt that the model sees whole
    lost: int = 0  # number of prompts that the model does not see whole
    first: str = ""  # row and reason of the first lost prompt

    def rows(self, rows: Rows, source: Source, encode: PromptEncoder | None) -> Iterator[CheckedRow]:
        """Every row of a source, counted; a prompt that the model would not see whole is a problem of its row."""
        for row in check_rows(rows, source):
            if row.problem is None and encode is not None:
                try:
                    self.lengths.append(len(encode(row.prompt)))
                except BadRow as problem:
                    row.problem = problem
                    self.lost += 1
                    self.first = self.first or f"{rows.where(row.number)}: {problem}"
            yield row

    def problem(self, limit: int) -> str:
        """Why the source cannot be used with `data.max_prompt_tokens` = `limit`; empty if it can."""
        shown = len(self.lengths)
        if self.lost > shown:
            return f"the model would not see {self.lost} of {self.lost + shown} prompts as they are ({self.first})"
        if shown and min(self.lengths) > limit:
            return (
                f"all {shown} prompts are longer than data.max_prompt_tokens = {limit}: the shortest has "
                f"{min(self.lengths)} tokens; raise it, with model.max_model_len"
            )
        return ""


class PromptEncoder:
    """Renders prompts to token ids as generators do, int32 [T]; raises `BadRow` if the model would not see it whole.

    Raises:
        UserError: the source's tools cannot be made, or the tokenizer has no chat template that fits them.
    """

    def __init__(self, config: Config, source: Source, tokenizer: Any) -> None:
        # They need packages of the generator.
        from generator.chat.prompts import Prompts
        from generator.episode.parts import make_template
        from generator.tools import Toolbox

        own = config.for_source(source)
        # Tools are described here and never called, so they need no sandbox.
        toolbox = Toolbox(own.episode, {"sandbox": lambda: None, "memory_mb": lambda: config.sandbox.memory_mb})
        self._tokenizer = tokenizer
        self._template = make_template(tokenizer, own, toolbox)
        self._prompts = Prompts(self._template, own.data)

    def __call__(self, prompt: str | Messages) -> np.ndarray:
        from generator.chat.prompts import PromptNotSeen

        try:
            return self._prompts.encode(prompt)
        except PromptNotSeen as error:
            raise BadRow(str(error), "template", error.reason) from None

    def text(self, prompt: str | Messages) -> str:
        """The prompt as the model sees it, markup included."""
        return str(self._tokenizer.decode(self(prompt)))

    def hints(self) -> Iterator[str]:
        """Warnings about calls, tools and headers that the template leaves out."""
        if self._prompts.unseen_call:
            yield f"{self._template.name} leaves out {self._prompts.unseen_call}; use another template"
        if header := self._template.unopened():
            yield (
                f"{self._template.name} ignores add_generation_prompt: prompts end without {header!r}, with which it "
                "begins the assistant's turns, so the model has to write it; use another template"
            )
        if unseen := self._template.undescribed_tools():
            yield (
                f"{self._template.name} does not describe tools: unless prompts or data.system_prompt do, the model "
                f"knows nothing of {', '.join(unseen)}"
            )


def report_source(
    source: Source, limit: int, encode: PromptEncoder | None, track: Track, examples: int = 1
) -> SourceReport:
    """Read all rows of a source.

    Args:
        encode: None if tokens are not counted.
        limit: `data.max_prompt_tokens`.
        examples: how many rows the report shows.
    """
    report = SourceReport(source.key, source.shown())
    try:
        rows = open_source(source)
    except UserError as error:
        report.problem = str(error)
        return report
    _read(report, rows, source, limit, encode, track, examples)
    return report


def _read(
    report: SourceReport, rows: Rows, source: Source, limit: int, encode: PromptEncoder | None, track: Track,
    examples: int,
) -> None:  # fmt: skip
    characters: list[int] = []
    rendered = Rendered()
    first_problem = ""
    hints = Hints(source, rows)
    for row in track(rendered.rows(rows, source, encode), len(rows), report.key):
        report.rows += 1
        hints.add(row)
        where = rows.where(row.number)
        for name in row.row or ():
            report.columns[name] = report.columns.get(name, 0) + 1
        if row.problem is not None:
            reason, general, kind = str(row.problem), row.problem.reason, row.problem.problem
            report.problems[kind] = report.problems.get(kind, 0) + 1
            report.reasons.setdefault(general, Occurrences()).add(where + reason.removeprefix(general))
            if not first_problem:
                columns = missing_columns(row.row, source) if row.row is not None else ""
                first_problem = f"{where}: {reason}" + (f"; {columns}" if columns else "")
            continue
        report.usable += 1
        # Two files may both number their rows from 0, so equal ids from a column do not mean equal prompts.
        report.ids.add((source.id_column, row.prompt_id, source.id_column and prompt_hash(row.prompt)))
        if row.answer is not None:
            report.answers.setdefault(answer_kind(row.answer), Occurrences()).add(where)
        if len(report.examples) < examples:
            prompt = _plain(row.prompt) if encode is None else encode.text(row.prompt)
            answer = "" if row.answer is None else answer_text(row.answer)
            report.examples.append(Example(where, prompt, answer))
        characters.append(_characters(row.prompt))
    report.hints += [*hints.lines(), *(encode.hints() if encode is not None else ())]
    report.problem = rendered.problem(limit)
    if not report.usable and not report.problem:
        report.problem = f"all {report.rows} rows are unusable ({first_problem})" if report.rows else "it is empty"
    report.characters, report.tokens = Lengths.of(characters), Lengths.of(rendered.lengths)
    report.too_long = None if encode is None else sum(count > limit for count in rendered.lengths)


def _characters(prompt: str | Messages) -> int:
    return len(prompt) if isinstance(prompt, str) else sum(len(str(message.get("content"))) for message in prompt)


def _plain(prompt: str | Messages) -> str:
    return prompt if isinstance(prompt, str) else "\n".join(f"{one['role']}: {one['content']}" for one in prompt)


def lines(report: SourceReport, limit: int) -> Iterator[str]:
    """A heading, then one line for each fact."""
    yield one_line(f"{report.key}: {report.data}")
    for name, text in _facts(report, limit):
        yield f"  {name:10}  {one_line(text)}"
    for example in report.examples:
        yield f"  {'example':10}  {one_line(example.where)}" + (" as the model sees it" if report.tokens else "")
        yield from (f"  {'':10}  | {line}" for line in visible(_cut(example.prompt)).split("\n"))
        yield from [f"  {'':10}  answer: {one_line(_cut(example.answer))}"] if example.answer else []


def _cut(text: str) -> str:
    """A long text without its middle."""
    return text if len(text) <= 2 * SHOWN else f"{text[:SHOWN]} […] {text[-SHOWN:]}"


def _facts(report: SourceReport, limit: int) -> Iterator[tuple[str, str]]:
    if report.problem:
        yield "unusable", report.problem
    if report.rows:
        yield "rows", f"{report.rows:,}, of which {report.usable:,} can be used"
        columns = (name if count == report.rows else f"{name} (in {count:,})" for name, count in report.columns.items())
        yield "columns", ", ".join(columns) or "none"
    for reason, rows in report.reasons.items():
        yield "skipped", f"{rows.count:,}: {reason} (first: {rows.first})"
    if report.answers:
        mixed = "; of different types, which no reward can compare" if report.mixed else ""
        several = len(report.answers) > 1
        kinds = (
            f"{kind} {rows.count:,}" + (f" (first: {rows.first})" if several else "")
            for kind, rows in report.answers.items()
        )
        yield "answers", ", ".join(kinds) + mixed
    for hint in report.hints:
        yield "warning", hint
    if report.characters is not None:
        yield "characters", _lengths(report.characters)
    if report.tokens is not None:
        too_long = f"{report.too_long:,} above data.max_prompt_tokens = {limit:,}"
        yield "tokens", f"{_lengths(report.tokens)}; {too_long}"


def _lengths(lengths: Lengths) -> str:
    return f"min {lengths.min:,}, median {lengths.median:,.0f}, p95 {lengths.p95:,.0f}, max {lengths.max:,}"
