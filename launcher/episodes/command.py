"""The command `spo episodes`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
import yaml
from rich.console import Console
from rich.text import Text

from common.errors import UserError
from launcher.episodes import view
from launcher.episodes.filter import Test, reward_test, sorted_rows, step_test
from launcher.episodes.rows import EpisodeRow, episode_files, read_episode, read_rows

PROMPT_CHARS = 120

Run = Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder, or the config.yaml in it.")]


def episodes(
    run: Run,
    show: Annotated[
        str | None, typer.Option(metavar="ID", help="Show this episode; 20/ID: that of version 20.")
    ] = None,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="With --show: every token, its log-prob and version.")
    ] = False,
    reward: Annotated[str | None, typer.Option(metavar="TEST", help="Such as '<0.5', '>=1' or 0.")] = None,
    min_tokens: Annotated[int | None, typer.Option(min=0, help="Prompt and response together.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=0, help="Prompt and response together.")] = None,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT|ID", help="Words of the prompt, or its id.")] = None,
    source: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of this data source, where there are several.")
    ] = None,
    reason: Annotated[str | None, typer.Option(metavar="TEXT", help="Words of why the episode ended.")] = None,
    error: Annotated[bool, typer.Option("--error", help="Set aside, or with a tool call that failed.")] = False,
    step: Annotated[str | None, typer.Option(metavar="N|N-M", help="Weight version at dispatch.")] = None,
    sort: Annotated[
        str, typer.Option(help="step, reward, turns, tokens, seconds or prompt; -NAME: downwards.")
    ] = "-step",
    limit: Annotated[int, typer.Option(min=0, help="Episodes to list; 0: all.")] = 20,
    plain: Annotated[bool, typer.Option("--plain", help="Plain text with tabs, as without a terminal.")] = False,
) -> None:
    """List the episodes a run has kept, or show one: its messages, tool calls, simulated user and reward.

    A run keeps the episodes of every `episode.rollouts_every`-th version, all tasks that were set aside, and the
    held-out episodes.

    - `spo episodes runs/quickstart-1`
    - `spo episodes runs/quickstart-1 --reward '<0.5' --sort -tokens --limit 5`
    - `spo episodes runs/quickstart-1 --step 10-30 --prompt '12 * 7' --reason length`
    - `spo episodes runs/quickstart-1 --error`
    - `spo episodes runs/quickstart-1 --show t0000012 --tokens | less`
    - `spo episodes runs/quickstart-1 --plain --limit 0 | cut -f 4 | sort | uniq -c`
    """
    tests: list[Test] = [lambda row: row.failed] if error else []
    if reward is not None:
        tests.append(reward_test(reward))
    if step is not None:
        tests.append(step_test(step))
    if min_tokens is not None:
        tests.append(lambda row: row.tokens >= min_tokens)
    if max_tokens is not None:
        tests.append(lambda row: row.tokens <= max_tokens)
    if prompt is not None:
        tests.append(lambda row: row.prompt_id == prompt or prompt.lower() in row.prompt.lower())
    if source is not None:
        # Where there are several, ids begin with the name.
        tests.append(lambda row: row.prompt_id.startswith(f"{source}/"))
    if reason is not None:
        tests.append(lambda row: reason.lower() in row.reason.lower())
    sorted_rows([], sort)  # refuses an unknown name before any file is read
    files = episode_files(run)
    console = Console(highlight=False)
    plain = plain or not console.is_terminal
    if show is not None:
        _show(run, _find(files, show, run), tokens, console, plain)
        return
    if tokens:
        raise UserError("--tokens shows one episode: give --show ID too")
    rows: list[EpisodeRow] = []
    unreadable = 0
    for row in read_rows(files):
        unreadable += row is None
        if row is not None and all(test(row) for test in tests):
            rows.append(replace(row, prompt=row.prompt[:PROMPT_CHARS]))
    listed = sorted_rows(rows, sort)[: limit or None]
    if plain:
        _write(view.plain_listing(listed))
    elif listed:
        console.print(view.listing(listed))
    notes = [f"{len(listed)} of {len(rows)} episodes; --limit 0 lists all" if len(listed) < len(rows) else ""]
    notes += ["no episode matches" if not rows else ""]
    notes += [f"{unreadable} lines could not be read" if unreadable else ""]
    for note in filter(None, notes):
        sys.stderr.write(f"{note}\n")


def _find(files: list[Path], name: str, run: Path) -> EpisodeRow:
    step, slash, task_id = name.rpartition("/")
    rows = [row for row in read_rows(files) if row and row.name == task_id and (not slash or str(row.step) == step)]
    if not rows:
        raise UserError(f"no episode {name!r} in {run}; `spo episodes {run}` lists them")
    if len(rows) > 1:
        names = ", ".join(f"{row.step}/{row.name}" for row in rows)
        raise UserError(f"{name!r} is the name of several episodes; give one of {names}")
    return rows[0]


def _show(run: Path, row: EpisodeRow, tokens: bool, console: Console, plain: bool) -> None:
    episode = read_episode(row)
    lines = list(view.shown(episode))
    if tokens:
        lines += [Text(), *view.tokens(episode, _decoder(run))]
    if plain:
        _write(line.plain for line in lines)
        return
    for line in lines:
        console.print(line, soft_wrap=True)


def _decoder(run: Path) -> Callable[[int], str] | None:
    """Text of a token id, where the run's model folder is at hand."""
    from tokenizers import Tokenizer

    try:
        config = yaml.safe_load(((run.parent if run.is_file() else run) / "config.yaml").read_text(encoding="utf-8"))
        tokenizer = Tokenizer.from_file(str(Path(config["model"]["path"]) / "tokenizer.json"))
    except Exception:
        # Without the tokenizer the ids are shown alone.
        return None
    return lambda token_id: str(tokenizer.decode([token_id], skip_special_tokens=False))


def _write(lines: Iterable[str]) -> None:
    for line in lines:
        sys.stdout.write(f"{line}\n")
