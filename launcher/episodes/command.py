"""`spo episodes`: looks into the episodes that a run has kept."""

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
from launcher.episodes.filter import Filter, sorted_rows
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
    reason: Annotated[str | None, typer.Option(metavar="TEXT", help="Words of why the episode ended.")] = None,
    error: Annotated[bool, typer.Option("--error", help="Set aside, or with a tool call that failed.")] = False,
    step: Annotated[str | None, typer.Option(metavar="N|N-M", help="Weight version at dispatch.")] = None,
    sort: Annotated[
        str, typer.Option(help="step, reward, turns, tokens, seconds or prompt; -NAME: downwards.")
    ] = "-step",
    limit: Annotated[int, typer.Option(min=0, help="Episodes to list; 0: all.")] = 20,
    plain: Annotated[bool, typer.Option("--plain", help="Plain text with tabs, as without a terminal.")] = False,
) -> None:
    """List the episodes a run has kept, or show one: what was said, what tools and users did, what it was worth.

    Kept are the episodes of every `episode.rollouts_every`-th version, all tasks that were set aside, and the held-out
    episodes.

    - `spo episodes runs/quickstart-1`
    - `spo episodes runs/quickstart-1 --reward '<0.5' --sort -tokens --limit 5`
    - `spo episodes runs/quickstart-1 --step 10-30 --prompt '12 * 7' --reason length`
    - `spo episodes runs/quickstart-1 --error`
    - `spo episodes runs/quickstart-1 --show t0000012 --tokens | less`
    - `spo episodes runs/quickstart-1 --plain --limit 0 | cut -f 4 | sort | uniq -c`
    """
    wanted = Filter(reward, min_tokens, max_tokens, prompt, reason, step, error).test()
    sorted_rows([], sort)
    files = episode_files(run)
    console = Console(highlight=False)
    plain = plain or not console.is_terminal
    if show is not None:
        _show(run, _found(files, show, run), tokens, console, plain)
        return
    if tokens:
        raise UserError("--tokens shows one episode: give --show ID too")
    rows: list[EpisodeRow] = []
    unreadable = 0
    for row in read_rows(files):
        unreadable += row is None
        if row is not None and wanted(row):
            rows.append(replace(row, prompt=row.prompt[:PROMPT_CHARS]))
    listed = sorted_rows(rows, sort)[: limit or None]
    if plain:
        _write(view.plain_listing(listed))
    elif listed:
        console.print(view.listing(listed))
    notes = [f"{len(listed)} of {len(rows)} episodes; --limit 0 lists all" if len(listed) < len(rows) else ""]
    notes += ["no episode is like that" if not rows else ""]
    notes += [f"{unreadable} lines could not be read" if unreadable else ""]
    for note in filter(None, notes):
        sys.stderr.write(f"{note}\n")


def _found(files: list[Path], name: str, run: Path) -> EpisodeRow:
    step, slash, task_id = name.rpartition("/")
    found = [row for row in read_rows(files) if row and row.name == task_id and (not slash or str(row.step) == step)]
    if not found:
        raise UserError(f"no episode {name!r} in {run}; `spo episodes {run}` lists them")
    if len(found) > 1:
        names = ", ".join(f"{row.step}/{row.name}" for row in found)
        raise UserError(f"{name!r} is the name of several episodes; give one of {names}")
    return found[0]


def _show(run: Path, row: EpisodeRow, tokens: bool, console: Console, plain: bool) -> None:
    episode = read_episode(row.place)
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
        # Ids say it too; a tokenizer that is elsewhere is no mistake.
        return None
    return lambda token_id: str(tokenizer.decode([token_id], skip_special_tokens=False))


def _write(lines: Iterable[str]) -> None:
    for line in lines:
        sys.stdout.write(f"{line}\n")
