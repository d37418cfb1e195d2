"""The command `spo episodes`."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from common.errors import UserError

if TYPE_CHECKING:
    from launcher.folder.episodes import EpisodeIndex

Run = Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder, or the config.yaml in it.")]


def episodes(
    run: Run,
    show: Annotated[
        str | None, typer.Option(metavar="ID", help="Show this episode; 20/ID: that of version 20.")
    ] = None,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="With --show: every token, its log-prob and version.")
    ] = False,
    reward: Annotated[str, typer.Option(metavar="TEST", help="Such as '<0.5', '>=1' or 0.")] = "",
    min_tokens: Annotated[int | None, typer.Option(min=0, help="Prompt and response together.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=0, help="Prompt and response together.")] = None,
    prompt: Annotated[str, typer.Option(metavar="ID|TEXT", help="The prompt's id, or words of it.")] = "",
    source: Annotated[str, typer.Option(metavar="NAME", help="Of this data source, where there are several.")] = "",
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Why the episode ended, or words of it.")] = "",
    error: Annotated[bool, typer.Option("--error", help="Skipped, or with a tool call that failed.")] = False,
    step: Annotated[str, typer.Option(metavar="N|N-M", help="Weight version at dispatch.")] = "",
    sort: Annotated[
        str, typer.Option(help="step, reward, turns, tokens, sampled, seconds or prompt; -NAME: downwards.")
    ] = "-step",
    limit: Annotated[int, typer.Option(min=0, help="Episodes to list; 0: all.")] = 20,
    plain: Annotated[bool, typer.Option("--plain", help="Plain text with tabs, as without a terminal.")] = False,
) -> None:
    """List the episodes a run has kept, or show one: its messages, tool calls, simulated user and reward.

    A run keeps the episodes of every `episode.rollouts_every`-th version, all tasks that were skipped, and the
    held-out episodes.

    - `spo episodes runs/quickstart-1`
    - `spo episodes runs/quickstart-1 --reward '<0.5' --sort -tokens --limit 5`
    - `spo episodes runs/quickstart-1 --step 10-30 --prompt '12 * 7' --reason length`
    - `spo episodes runs/quickstart-1 --error`
    - `spo episodes runs/quickstart-1 --show t0000012 --tokens | less`
    - `spo episodes runs/quickstart-1 --plain --limit 0 | cut -f 4 | sort | uniq -c`
    """
    from launcher.episodes import view  # imports numpy, like all that follows
    from launcher.folder.episodes import EpisodeIndex
    from launcher.folder.query import Query, page

    bounds = {">=": min_tokens, "<=": max_tokens}
    query = Query(
        kind="failed" if error else "",
        reward=reward,
        tokens=",".join(f"{compare}{bound}" for compare, bound in bounds.items() if bound is not None),
        prompt=prompt,
        source=source,
        reason=reason,
        step=step,
        sort=sort,
    )
    folder = run.parent if run.is_file() else run
    if not folder.is_dir():
        raise UserError(f"{run} is no run folder: it does not exist")
    index = EpisodeIndex(folder)
    index.update()
    if not index.has_files:
        raise UserError(
            f"{run} holds no episodes: neither rollouts/ (episode.rollouts_every > 0) nor validation_data/ "
            "(data.heldout) has a file; give the folder that `spo run` names, for example runs/quickstart-1"
        )
    console = Console(highlight=False)
    plain = plain or not console.is_terminal
    if show is not None:
        _print(_shown(index, folder, show, tokens), console, plain)
        return
    if tokens:
        raise UserError("--tokens shows one episode: give --show ID too")
    listed = page(index, query, 0, limit or sys.maxsize, most_bytes=math.inf)
    if plain:
        _write(view.plain_listing(listed.rows))
    elif listed.rows:
        console.print(view.listing(listed.rows))
    notes = ["no episode matches" if not listed.rows else ""]
    if listed.next is not None:
        of_all = "the first" if listed.total is None else f"{len(listed.rows)} of {listed.total}"
        notes = [f"{of_all} episodes; --limit 0 lists all"]
    notes += [f"{index.unreadable} lines could not be read" if index.unreadable else ""]
    for note in filter(None, notes):
        sys.stderr.write(f"{note}\n")


def _shown(index: EpisodeIndex, folder: Path, name: str, tokens: bool) -> Iterable[Text]:
    from launcher.episodes import view
    from launcher.folder.episodes import read_line
    from launcher.folder.query import Query, page
    from launcher.folder.run_folder import RunFolder, model_of
    from launcher.page.episode import decoder

    step, _, task_id = name.rpartition("/")
    rows = [
        row for row in page(index, Query(task=task_id, step=step, sort="step"), 0, 100).rows if row["task"] == task_id
    ]
    if not rows:
        raise UserError(f"no episode {name!r} in {folder}; `spo episodes {folder}` lists them")
    if len(rows) > 1:
        names = ", ".join(f"{row['step']}/{row['task']}" for row in rows)
        raise UserError(f"{name!r} is the name of several episodes; give one of {names}")
    episode = read_line(folder / rows[0]["file"], rows[0]["offset"]) or {}
    yield from view.shown(episode)
    if tokens:
        model = model_of(RunFolder(folder, folder.name).config())
        yield Text()
        yield from view.tokens(episode, decoder(model) if model else None)


def _print(lines: Iterable[Text], console: Console, plain: bool) -> None:
    if plain:
        _write(line.plain for line in lines)
        return
    for line in lines:
        console.print(line, soft_wrap=True)


def _write(lines: Iterable[str]) -> None:
    for line in lines:
        sys.stdout.write(f"{line}\n")
