"""The command `spo episodes`: lists the episodes that a run has kept, or shows one."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from common.errors import UserError, one_line, visible
from launcher.folder.episodes import EpisodeIndex, read_line
from launcher.folder.query import Query, page
from launcher.folder.run_folder import RunFolder, model_of
from launcher.page.episode import decoder, mappings, request_lines, row_starts, sampled_positions, scored_facts

COLUMNS = ("step", "episode", "prompt", "reward", "turns", "tokens", "reason", "flags", "response")
LONG = ("prompt", "reason", "response")
STYLES = {"assistant": "bold cyan", "tool": "bold magenta", "user": "bold yellow", "system": "bold"}
# Lowest log-prob of each style: tokens that the model was sure of are green.
LOGPROB_STYLES = ((-0.1, "green"), (-1.0, "yellow"), (-3.0, "dark_orange"), (-math.inf, "red"))


def episodes(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder, or the config.yaml in it.")],
    show: Annotated[
        str | None, typer.Option(metavar="ID", help="Show this episode; 20/ID: the one of version 20.")
    ] = None,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="With --show: also show every token, its log-prob and version.")
    ] = False,
    reward: Annotated[str, typer.Option(metavar="TEST", help="Reward, such as '<0.5', '>=1' or 0.")] = "",
    min_tokens: Annotated[int | None, typer.Option(min=0, help="At least this many tokens, with the prompt.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=0, help="At most this many tokens, with the prompt.")] = None,
    prompt: Annotated[str, typer.Option(metavar="ID|TEXT", help="The prompt's id, or words in it.")] = "",
    source: Annotated[str, typer.Option(metavar="NAME", help="Data source, if there are several.")] = "",
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Why the episode ended, or words of the reason.")] = "",
    error: Annotated[bool, typer.Option("--error", help="Only skipped episodes, or with a failed tool call.")] = False,
    step: Annotated[str, typer.Option(metavar="N|N-M", help="Weight version at dispatch.")] = "",
    sort: Annotated[
        str, typer.Option(help="step, reward, turns, tokens, sampled, seconds or prompt; -NAME: descending.")
    ] = "-step",
    limit: Annotated[int, typer.Option(min=0, help="Episodes to list; 0: all.")] = 20,
    plain: Annotated[bool, typer.Option("--plain", help="Tab-separated text (as without a terminal).")] = False,
) -> None:
    """List the episodes a run has kept, or show one: its messages, tool calls, simulated user and reward.

    A run keeps the training episodes of every `episode.rollouts_every`-th version, all skipped tasks, and the held-out
    episodes.

    - `spo episodes runs/quickstart-1`
    - `spo episodes runs/quickstart-1 --reward '<0.5' --sort -tokens --limit 5`
    - `spo episodes runs/quickstart-1 --step 10-30 --prompt '12 * 7' --reason length`
    - `spo episodes runs/quickstart-1 --error`
    - `spo episodes runs/quickstart-1 --show t0000012 --tokens | less`
    - `spo episodes runs/quickstart-1 --plain --limit 0 | cut -f 4 | sort | uniq -c`
    """
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
        raise UserError(f"{run} is not a run folder: it does not exist")
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
        _print(_one(index, folder, show, tokens), console, plain)
        return
    if tokens:
        raise UserError("--tokens shows one episode: give --show ID too")
    listed = page(index, query, 0, limit or sys.maxsize, most_bytes=math.inf)
    if plain:
        _write("\t".join(cells) for cells in (COLUMNS, *map(_cells, listed.rows)))
    elif listed.rows:
        console.print(listing(listed.rows))
    notes = ["no episode matches" if not listed.rows else ""]
    if listed.next is not None:
        of_all = "the first" if listed.total is None else f"{len(listed.rows)} of {listed.total}"
        notes = [f"{of_all} episodes; --limit 0 lists all"]
    notes += [f"{index.unreadable} lines could not be read" if index.unreadable else ""]
    for note in filter(None, notes):
        sys.stderr.write(f"{note}\n")


def _one(index: EpisodeIndex, folder: Path, name: str, tokens: bool) -> Iterable[Text]:
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
    yield from episode_lines(episode)
    if tokens:
        model = model_of(RunFolder(folder, folder.name).config())
        yield Text()
        yield from token_lines(episode, decoder(model) if model else None)


def _print(lines: Iterable[Text], console: Console, plain: bool) -> None:
    if plain:
        _write(line.plain for line in lines)
        return
    for line in lines:
        console.print(line, soft_wrap=True)


def _write(lines: Iterable[str]) -> None:
    for line in lines:
        sys.stdout.write(f"{line}\n")


def listing(rows: list[dict[str, Any]]) -> Table:
    """A table of episodes; each row is an `episode_row`."""
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for column in COLUMNS:
        # Long texts are shortened if the terminal is narrow.
        is_number = column in ("step", "reward", "turns", "tokens")
        table.add_column(column, justify="right" if is_number else "left", no_wrap=column not in LONG)
    for row in rows:
        step, name, prompt, *rest, reason, flags, response = _cells(row)
        style = "red" if {"skipped", "tool error"} & set(row["flags"]) else ""
        table.add_row(
            step, name, _cut(prompt, "dim"), *rest, _cut(reason, style), Text(flags, style), _cut(response, "")
        )
    return table


def _cut(text: str, style: str) -> Text:
    return Text(text, style, no_wrap=True, overflow="ellipsis")


def _cells(row: dict[str, Any]) -> list[str]:
    names = ("step", "task", "prompt", "reward", "turns", "tokens", "reason")
    values = {**row, "reward": number(row["reward"])}
    flags = ", ".join(flag for flag in row["flags"] if flag != "tokens")
    return [*(one_line(str(values[name])) for name in names), flags, one_line(values["response"])]


def episode_lines(episode: dict[str, Any]) -> Iterator[Text]:
    """The lines that show an episode, from its prompt to its end."""
    yield from _heading(episode)
    prompt = episode.get("input")
    for message in mappings(prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]):
        yield from _message(message, "prompt")
    turn = 0
    for message in mappings(episode.get("messages")):
        turn += message.get("role") == "assistant"
        yield from _message(message, _about(message, turn))
    if requests := request_lines(episode):
        yield Text()
        yield Text("requests", "bold")
        yield from (Text(visible(line)) for line in requests)
    yield Text()
    yield Text.assemble(("expected ", "dim"), visible(as_text(episode.get("gts"))))


def token_lines(episode: dict[str, Any], decode: Callable[[int], str] | None) -> Iterator[Text]:
    """Position, id, log-prob and version of every token, and its text if `decode` is given."""
    if not isinstance(episode.get("token_ids"), list) or "version_spans" not in episode:
        yield Text("the tokens of this episode were not kept")
        return
    try:
        lines = list(_token_lines(episode, decode))
    except (LookupError, TypeError, ValueError, OverflowError, RuntimeError):
        lines = [Text("the tokens of this episode do not fit together: its record is damaged")]
    yield from lines


def _token_lines(episode: dict[str, Any], decode: Callable[[int], str] | None) -> Iterator[Text]:
    """See `token_lines`; raises an error if counts, spans or numbers in the record disagree."""
    ids = episode["token_ids"]
    versions = (span[0] for span in episode["version_spans"] for _ in range(span[1], span[2]))
    scored = zip(episode["logprobs"], versions, strict=True)
    sampled = set(sampled_positions(episode))
    rows = {start: number for number, start in enumerate(row_starts(episode), 1)}
    yield Text(f"{'token':>7} {'id':>8} {'log-prob':>9} {'version':>7}  text", "dim")
    for position, token_id in enumerate(ids):
        text = one_line(repr(decode(token_id))) if decode else ""
        if len(rows) > 1 and position in rows:
            yield Text(f"row {rows[position]} of {len(rows)}", "bold")
        if position in sampled:
            logprob, version = next(scored)
            style = next(style for least, style in LOGPROB_STYLES if logprob >= least)
            yield Text(f"{position:>7} {token_id:>8} {logprob:>9.4f} {version:>7}  {text}".rstrip(), style)
        else:
            yield Text(f"{position:>7} {token_id:>8} {'–':>9} {'–':>7}  {text}".rstrip(), "dim")
    if next(scored, None) is not None:
        raise ValueError("more log-probs than sampled tokens")


def _heading(episode: dict[str, Any]) -> Iterator[Text]:
    yield Text(one_line(f"{episode.get('task_id')}, prompt {episode.get('prompt_id')}, {episode.get('kind')}"), "bold")
    reason = one_line(str(episode.get("reason", "")))
    if episode.get("status") == "set_aside":
        yield Text.assemble(("skipped: ", "bold red"), reason)
    else:
        by_name, rewards = episode.get("parts"), episode.get("turn_rewards")
        parts = [f"{name} {number(value)}" for name, value in (by_name if isinstance(by_name, dict) else {}).items()]
        by_turn = [number(reward) for reward in (rewards if isinstance(rewards, list) else ())]
        parts += [f"turn by turn {' '.join(by_turn)}"] if by_turn else []
        yield Text(one_line(f"reward {number(episode.get('reward'))}" + (f" ({', '.join(parts)})" if parts else "")))
        yield Text(f"ended by {reason}")
    yield from (Text(f"{name} {visible(text)}") for name, text in scored_facts(episode))
    facts = [
        f"dispatched at version {episode.get('version')}",
        f"sampled by {' to '.join(map(str, sorted(set(episode['versions']))))}" if episode.get("versions") else "",
        f"value before {number(episode['value'])}" if "value" in episode else "",
        f"{episode.get('turns')} turns, {episode.get('tool_calls')} tool calls",
        f"{episode.get('tokens')} tokens, {episode.get('model_tokens')} of them sampled"
        + (f", in {episode['rows']} rows" if episode.get("rows", 1) != 1 else ""),
        f"{number(episode.get('seconds'))} s at {episode.get('generator')}",
        f"left out: {as_text(episode['left_out'])}" if episode.get("left_out") else "",
    ]
    for fact in filter(None, facts):
        yield Text(one_line(fact), "dim")


def _message(message: dict[str, Any], about: str) -> Iterator[Text]:
    role, text = str(message.get("role")), as_text(message.get("content"))
    if "request" in message:
        calls = message.get("tool_calls")
        said = [message.get("reasoning"), text, *(calls if isinstance(calls, list) else ())]
        text = "\n".join(as_text(one) for one in said if one)
    yield Text()
    yield Text.assemble((one_line(role), STYLES.get(role, "bold")), "  ", (one_line(about), "dim"))
    says_nothing = role == "user" and not text
    yield Text("(the conversation ends here)", "dim") if says_nothing else Text(visible(text))


def _about(message: dict[str, Any], turn: int) -> str:
    if "request" in message:
        return f"request {message['request']}"
    if message.get("role") == "assistant":
        return f"turn {turn}"
    if message.get("role") == "tool":
        failed = "failed: " if message.get("error") else ""
        return f"{failed}{message.get('name')} {as_text(message.get('arguments'))}"
    about = f"reward {number(message.get('reward', 0.0))}"
    return f"{about}, {as_text(message['metadata'])}" if message.get("metadata") else about


def as_text(value: Any) -> str:
    """A string as it is, None as "", anything else as JSON."""
    return "" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def number(value: Any) -> str:
    """A number with four significant digits; a dash for anything else."""
    return f"{value:.4g}" if isinstance(value, int | float) else "–"
