"""The report on one source as lines for people."""

from __future__ import annotations

from collections.abc import Iterator

from common.errors import one_line
from launcher.data.source_report import Lengths, SourceReport


def lines(report: SourceReport, limit: int) -> Iterator[str]:
    """One heading, and a line for each thing that was looked at."""
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
        yield "set aside", f"{rows.count:,}: {reason} (first: {rows.first})"
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
