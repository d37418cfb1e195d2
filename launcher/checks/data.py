"""The command `spo data check`: reads every row of a run's data and reports what is in them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import track as show_progress

from common.checks.check import Check, Context, Finding, Need, When, examine, ok, problem, refuse_problems, warning
from common.checks.list import CHECKS
from common.checks.machine import Machine
from common.config import load_config, parse_config
from common.config.load import override as set_overrides
from common.errors import UserError, one_line
from common.process import Role, run_coroutine
from common.scripts import OverrideOption

if TYPE_CHECKING:
    from launcher.checks.rows import SourceReport

app = typer.Typer(
    help="Look at the data of a run.", no_args_is_help=True, rich_markup_mode="markdown", add_completion=False
)

CONFIGS = (".yaml", ".yml")
NO_MODEL = "none"  # model.path if neither the command line nor a configuration names a model
SLOW_ROWS = 256  # of each source, on which a reward of the user's own is tried
TRIED = ("reward", "tasks")  # names of the checks whose findings are shown


@app.callback()
def data() -> None:
    """Look at the data of a run."""


@app.command()
def check(
    what: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG|DATA", help="A run's YAML file, or data: *.jsonl, *.parquet, a dataset, a known set."
        ),
    ],
    tokenizer: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Model whose tokenizer counts tokens; by default model.path.")
    ] = None,
    examples: Annotated[int, typer.Option(min=0, help="Rows of each source to show as the model sees them.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="The report as JSON.")] = False,
    override: OverrideOption = None,
) -> None:
    """Read every row of a run's data, and report on each source: how many rows can be used, what is wrong with the
    others, columns, types of answers, lengths of prompts, and a row as the model sees it. With a reward, list the
    references that it fails on, or that no answer can match. For tasks in containers, build missing images, and try
    some solutions. Exit code 2 if a source has no usable row, or the reward fails on most.

    - `spo data check my.yaml`
    - `spo data check data/maths.parquet -o data.prompt_column=problem`
    - `spo data check gsm8k --tokenizer Qwen/Qwen3-0.6B --json`
    """
    from launcher.checks.rows import lines  # imports pyarrow, which not every role has

    is_config = Path(what).suffix in CONFIGS
    if is_config:
        config = load_config(what, override or ())
    else:
        tree: dict[str, Any] = {"model": {"path": NO_MODEL}, "data": {"train": what}}
        set_overrides(tree, override or ())
        config = parse_config(tree)
    reports: list[SourceReport] = []
    notes: list[str] = []
    model = tokenizer or (None if config.model.path == NO_MODEL else config.model.path)
    has_reward = is_config or any(one.startswith("episode.reward") for one in override or ())
    checks = [
        *CHECKS,
        Check("rows", partial(_rows, model, reports, notes, examples), When.DATA, (Role.SAMPLER,), Need.CONFIG),
        *([Check("reward", _reward, When.DATA, (Role.SAMPLER,), Need.CONFIG)] if has_reward else []),
        Check("tasks", _tasks, When.DATA, (Role.SAMPLER,), Need.CONFIG),
    ]
    findings = examine(checks, When.DATA, Context(Role.SAMPLER, Machine(), config))
    note = notes[-1] if notes else ""
    trained = set().union(*(report.ids for report in reports if report.key.startswith("data.train")))
    heldout = [report.ids for report in reports if report.key.startswith("data.heldout")]
    shared = sum(len(ids & trained) for ids in heldout) if heldout else None
    if as_json:
        sources = [_plain(report) for report in reports]
        result = {"sources": sources, "heldout_also_trained_on": shared, "tokens_not_counted": note}
        for name in TRIED:
            result[name] = [{"level": one.level.value, "line": one.line} for one in findings if one.name == name]
        sys.stdout.write(json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    else:
        limit = config.data.max_prompt_tokens
        text = [line for report in reports for line in lines(report, limit)]
        text += [f"tokens are not counted: {note}"] if note else []
        text += [f"{shared:,} held-out prompts are also trained on"] if shared else []
        text += [f"{finding.name}: {one_line(finding.line)}" for finding in findings if finding.name in TRIED]
        sys.stdout.write("\n".join(text) + "\n")
    refuse_problems(findings)


def _rows(
    model: str | None, reports: list[SourceReport], notes: list[str], examples: int, context: Context
) -> Iterator[Finding]:
    """Read every row; a source without a usable row is a problem.

    Args:
        model: its tokenizer counts the tokens.
        reports: a report on each source is appended here.
        notes: the reasons why tokens are not counted are appended here.
        examples: how many rows of each source are shown.
    """
    from generator.chat.token_text import load_tokenizer
    from launcher.checks.rows import PromptEncoder, report_source

    config, tokenizer = context.config, None
    try:
        if model is None:
            raise UserError("no model is named (--tokenizer)")
        tokenizer = load_tokenizer(model, config.model.trust_remote_code)
    except UserError as error:
        notes.append(str(error))
    for source in config.data.all_sources():
        encode = None
        try:
            encode = PromptEncoder(config, source, tokenizer) if tokenizer is not None else None
        except UserError as error:  # of the template, or of the tools
            notes.append(f"{source.key}: {error}")
            yield problem(notes[-1])
        report = report_source(source, config.data.max_prompt_tokens, encode, _track, examples)
        reports.append(report)
        line = f"{report.key}: {report.data}"
        yield problem(f"{line}: {report.problem}") if report.problem else ok(line)


def _reward(context: Context) -> Iterator[Finding]:
    """Try the reward of each source on its reference answers; on all of them if that is quick."""
    try:
        from launcher.checks.rewards import try_sources  # needs packages of the generator
    except ImportError as error:
        yield warning(f"not tried, since {error.name} is not installed here")
        return
    yield from run_coroutine(try_sources(context.config, SLOW_ROWS, all_if_quick=True, track=_track))


def _tasks(context: Context) -> Iterator[Finding]:
    """Build the images of tasks that agents play in containers, and play some of them."""
    if context.config.uses_containers:
        from launcher.checks.containers import try_tasks  # needs packages of the generator

        yield from run_coroutine(try_tasks(context.config, _track))


def _track(rows: Iterable[Any], total: int, what: str) -> Iterator[Any]:
    """Show a progress bar if stderr is a terminal."""
    console = Console(stderr=True)
    yield from show_progress(rows, what, total=total, console=console, transient=True, disable=not console.is_terminal)


def _plain(report: SourceReport) -> dict[str, Any]:
    row = asdict(report)
    del row["ids"]
    return row | {"mixed_answers": report.mixed}
