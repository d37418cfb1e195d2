"""A report on the rows of one source: how many can be used, what is wrong with the others, lengths and answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from common.answers import answer_kind, are_mixed
from common.config import Config, Source
from common.errors import UserError, one_line
from common.model import end_ids, hub_answers
from sampler.chat import Messages
from sampler.prompts import check_rows, missing_columns
from sampler.rows import Rows, open_rows

# Token ids of a prompt as a generator would render it, int32 [T].
Encode = Callable[[str | Messages], np.ndarray]
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
        """None where there is no value."""
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


@dataclass(slots=True)
class SourceReport:
    """The report on one source.

    Attributes:
        key, data: the source's key in the configuration, and what is read.
        problem: why no row can be used; empty if some can.
        problems: how many rows cannot be used, by kind: `unreadable`, `prompt`, `answer`, `id`, `duplicate`.
        reasons: the same by error message.
        answers: usable rows by the kind of their answer.
        columns: how many rows have each column.
        too_long: prompts with more tokens than `data.max_prompt_tokens`; None if tokens are not counted.
        ids: ids of the usable rows, each with its column (None: the id is a hash of the prompt).
    """

    key: str
    data: str
    problem: str = ""
    rows: int = 0
    usable: int = 0
    problems: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, Occurrences] = field(default_factory=dict)
    answers: dict[str, Occurrences] = field(default_factory=dict)
    columns: dict[str, int] = field(default_factory=dict)
    characters: Lengths | None = None
    tokens: Lengths | None = None
    too_long: int | None = None
    ids: set[tuple[str | None, str]] = field(default_factory=set)

    @property
    def mixed(self) -> bool:
        """Whether no reward can compare all answers, since their types differ."""
        return are_mixed(self.answers)


def load_tokenizer(path: str, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a model; raises `UserError` if it cannot be loaded."""
    from transformers import AutoTokenizer  # slow to import

    # Without a network the library would try each file for half a minute.
    is_cut_off = not Path(path).is_dir() and not hub_answers()
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code, local_files_only=is_cut_off)
    except Exception as error:  # the library and the network raise many types, all about this path
        reason = str(error).splitlines()[0][:200]
        if is_cut_off:
            reason = "it is no folder here, it is not in the cache, and the Hugging Face hub cannot be reached"
        raise UserError(f"the tokenizer of {path} cannot be loaded: {reason}") from None


def prompt_encoder(config: Config, source: Source, tokenizer: Any) -> Encode:
    """A function that gives a prompt's token ids, with the source's system prompt and tools; raises `UserError`."""
    from generator.chat_template import ChatTemplate  # only with a tokenizer: it needs packages of the generator
    from generator.formats import make_format
    from generator.tools import Toolbox

    settings = config.for_source(source)
    # Tools are described here and never called, so they need no sandbox.
    toolbox = Toolbox(settings.episode, {"sandbox": lambda: None, "memory_mb": lambda: config.sandbox.memory_mb})
    described = make_format(settings.episode.call_format).wrap is None
    template = ChatTemplate(tokenizer, toolbox.schemas() if described else None, end_ids(config.model.path))
    data = settings.data

    def encode(prompt: str | Messages) -> np.ndarray:
        return template.prompt(prompt, data.system_prompt, markup=data.prompt_markup)

    return encode


def report_source(source: Source, limit: int, encode: Encode | None, track: Track) -> SourceReport:
    """Read all rows of a source.

    Args:
        encode: see `prompt_encoder`; None: tokens are not counted.
        limit: `data.max_prompt_tokens`.
    """
    report = SourceReport(source.key, source.shown())
    try:
        rows = open_rows(source.path, source.split, source.options, source.config)
    except UserError as error:
        report.problem = str(error)
        return report
    _read(report, rows, source, limit, encode, track)
    return report


def _read(report: SourceReport, rows: Rows, source: Source, limit: int, encode: Encode | None, track: Track) -> None:
    characters: list[int] = []
    tokens: list[int] = []
    first_problem = ""
    for row in track(check_rows(rows, source), len(rows), report.key):
        report.rows += 1
        where = rows.where(row.number)
        for name in row.row or ():
            report.columns[name] = report.columns.get(name, 0) + 1
        if row.problem is not None:
            reason, kind = str(row.problem), row.problem.problem
            report.problems[kind] = report.problems.get(kind, 0) + 1
            # A parser's details differ from row to row, so they are not part of the reason.
            general, _, details = reason.partition(" (") if kind == "unreadable" else (reason, "", "")
            first = f"{where}: {details.removesuffix(')')}" if details else where
            report.reasons.setdefault(general, Occurrences()).add(first)
            if not first_problem:
                columns = missing_columns(row.row, source) if row.row is not None else ""
                first_problem = f"{where}: {reason}" + (f"; {columns}" if columns else "")
            continue
        report.usable += 1
        report.ids.add((source.id_column, row.prompt_id))
        report.answers.setdefault(answer_kind(row.answer), Occurrences()).add(where)
        characters.append(_characters(row.prompt))
        if encode is not None:
            tokens.append(len(encode(row.prompt)))
    if not report.usable:
        report.problem = f"all {report.rows} rows are unusable ({first_problem})" if report.rows else "it is empty"
    report.characters, report.tokens = Lengths.of(characters), Lengths.of(tokens)
    report.too_long = None if encode is None else sum(count > limit for count in tokens)


def _characters(prompt: str | Messages) -> int:
    return len(prompt) if isinstance(prompt, str) else sum(len(str(message.get("content"))) for message in prompt)


def lines(report: SourceReport, limit: int) -> Iterator[str]:
    """A heading, then one line for each fact."""
    yield one_line(f"{report.key}: {report.data}")
    for name, text in _facts(report, limit):
        yield f"  {name:10}  {one_line(text)}"


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
        mixed = "; of different types, which no reward compares alike" if report.mixed else ""
        several = len(report.answers) > 1
        kinds = (
            f"{kind} {rows.count:,}" + (f" (first: {rows.first})" if several else "")
            for kind, rows in report.answers.items()
        )
        yield "answers", ", ".join(kinds) + mixed
    if report.characters is not None:
        yield "characters", _lengths(report.characters)
    if report.tokens is not None:
        too_long = f"{report.too_long:,} above data.max_prompt_tokens = {limit:,}"
        yield "tokens", f"{_lengths(report.tokens)}; {too_long}"


def _lengths(lengths: Lengths) -> str:
    return f"min {lengths.min:,}, median {lengths.median:,.0f}, p95 {lengths.p95:,.0f}, max {lengths.max:,}"
