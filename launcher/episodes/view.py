"""Single episodes and lists of them, for a terminal or as plain text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from rich.table import Table
from rich.text import Text

from common.errors import one_line, visible
from launcher.episodes.rows import EpisodeRow
from launcher.episodes.turns import Turn, number, plain, turns

COLUMNS = ("step", "episode", "prompt", "reward", "turns", "tokens", "reason", "flags")
STYLES = {"assistant": "bold cyan", "tool": "bold magenta", "user": "bold yellow", "system": "bold"}
# Log-prob down to which a token has the style: what the model was sure of is green.
LOGPROB_STYLES = ((-0.1, "green"), (-1.0, "yellow"), (-3.0, "dark_orange"), (-math.inf, "red"))


def listing(rows: list[EpisodeRow]) -> Table:
    """One row an episode."""
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for column in COLUMNS:
        # Prompt and reason give way where the terminal is narrow.
        number = column in ("step", "reward", "turns", "tokens")
        table.add_column(column, justify="right" if number else "left", no_wrap=column not in ("prompt", "reason"))
    for row in rows:
        step, name, prompt, *rest, reason, flags = _cells(row)
        style = "red" if row.failed else ""
        table.add_row(step, name, _cut(prompt, "dim"), *rest, _cut(reason, style), Text(flags, style))
    return table


def _cut(text: str, style: str) -> Text:
    return Text(text, style, no_wrap=True, overflow="ellipsis")


def plain_listing(rows: list[EpisodeRow]) -> Iterator[str]:
    """The same as lines with tabs between the columns, nothing shortened but the prompt."""
    yield "\t".join(COLUMNS)
    for row in rows:
        yield "\t".join(_cells(row))


def _cells(row: EpisodeRow) -> list[str]:
    values = (row.step, row.name, row.prompt, number(row.reward), row.turns, row.tokens, row.reason)
    return [*(one_line(str(value)) for value in values), ", ".join(row.flags)]


def shown(episode: dict[str, Any]) -> Iterator[Text]:
    """An episode from its prompt to its end, a line or a turn at a time."""
    yield from _heading(episode)
    for turn in turns(episode):
        yield from _turn(turn)
    yield Text()
    yield Text.assemble(("expected ", "dim"), visible(plain(episode.get("gts"))))


def tokens(episode: dict[str, Any], decode: Callable[[int], str] | None) -> Iterator[Text]:
    """Position, id, log-prob, version and, where a tokenizer is known, text of every token."""
    ids = episode.get("token_ids")
    if not isinstance(ids, list):
        yield Text("no tokens were kept of this episode")
        return
    versions = (span[0] for span in episode["version_spans"] for _ in range(span[1], span[2]))
    scored = zip(episode["logprobs"], versions, strict=True)
    sampled = {i for start, end in episode["model_spans"] for i in range(start, end)}
    yield Text(f"{'token':>7} {'id':>8} {'log-prob':>9} {'version':>7}  text", "dim")
    for position, token_id in enumerate(ids):
        text = one_line(repr(decode(token_id))) if decode else ""
        if position in sampled:
            logprob, version = next(scored)
            style = next(style for least, style in LOGPROB_STYLES if logprob >= least)
            yield Text(f"{position:>7} {token_id:>8} {logprob:>9.4f} {version:>7}  {text}".rstrip(), style)
        else:
            yield Text(f"{position:>7} {token_id:>8} {'–':>9} {'–':>7}  {text}".rstrip(), "dim")


def _heading(episode: dict[str, Any]) -> Iterator[Text]:
    set_aside = episode.get("status") == "set_aside"
    yield Text(one_line(f"{episode.get('task_id')}, prompt {episode.get('prompt_id')}, {episode.get('kind')}"), "bold")
    reason = one_line(str(episode.get("reason", "")))
    if set_aside:
        yield Text.assemble(("set aside: ", "bold red"), reason)
    else:
        parts = [f"{name} {number(value)}" for name, value in (episode.get("parts") or {}).items()]
        by_turn = [number(reward) for reward in episode.get("turn_rewards") or ()]
        parts += [f"turn by turn {' '.join(by_turn)}"] if by_turn else []
        yield Text(one_line(f"reward {number(episode.get('reward'))}" + (f" ({', '.join(parts)})" if parts else "")))
        yield Text(f"ended by {reason}")
    facts = [
        f"dispatched at version {episode.get('version')}",
        f"sampled by {' to '.join(map(str, sorted(set(episode['versions']))))}" if episode.get("versions") else "",
        f"value before {number(episode['value'])}" if "value" in episode else "",
        f"{episode.get('turns')} turns, {episode.get('tool_calls')} tool calls",
        f"{episode.get('tokens')} tokens, {episode.get('model_tokens')} of them sampled",
        f"{number(episode.get('seconds'))} s at {episode.get('generator')}",
        f"left out: {plain(episode['left_out'])}" if episode.get("left_out") else "",
    ]
    for fact in filter(None, facts):
        yield Text(one_line(fact), "dim")


def _turn(turn: Turn) -> Iterator[Text]:
    yield Text()
    yield Text.assemble((one_line(turn.role), STYLES.get(turn.role, "bold")), "  ", (one_line(turn.about), "dim"))
    says_nothing = turn.role == "user" and not turn.text
    yield Text("(the conversation ends here)", "dim") if says_nothing else Text(visible(turn.text))
