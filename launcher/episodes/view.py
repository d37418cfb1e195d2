"""Episodes and lists of them, for a terminal or as plain text."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

from rich.table import Table
from rich.text import Text

from common.errors import one_line, visible

COLUMNS = ("step", "episode", "prompt", "reward", "turns", "tokens", "reason", "flags")
STYLES = {"assistant": "bold cyan", "tool": "bold magenta", "user": "bold yellow", "system": "bold"}
# Log-prob down to which a token has the style: what the model was sure of is green.
LOGPROB_STYLES = ((-0.1, "green"), (-1.0, "yellow"), (-3.0, "dark_orange"), (-math.inf, "red"))


def listing(rows: list[dict[str, Any]]) -> Table:
    """One row an episode, as `episode_row` has it."""
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for column in COLUMNS:
        # Prompt and reason give way where the terminal is narrow.
        is_number = column in ("step", "reward", "turns", "tokens")
        table.add_column(column, justify="right" if is_number else "left", no_wrap=column not in ("prompt", "reason"))
    for row in rows:
        step, name, prompt, *rest, reason, flags = _cells(row)
        style = "red" if {"skipped", "tool error"} & set(row["flags"]) else ""
        table.add_row(step, name, _cut(prompt, "dim"), *rest, _cut(reason, style), Text(flags, style))
    return table


def _cut(text: str, style: str) -> Text:
    return Text(text, style, no_wrap=True, overflow="ellipsis")


def plain_listing(rows: list[dict[str, Any]]) -> Iterator[str]:
    """The same as lines with tabs between the columns, nothing shortened but the prompt."""
    yield "\t".join(COLUMNS)
    for row in rows:
        yield "\t".join(_cells(row))


def _cells(row: dict[str, Any]) -> list[str]:
    names = ("step", "task", "prompt", "reward", "turns", "tokens", "reason")
    values = {**row, "reward": number(row["reward"])}
    flags = ", ".join(flag for flag in row["flags"] if flag != "tokens")
    return [*(one_line(str(values[name])) for name in names), flags]


def shown(episode: dict[str, Any]) -> Iterator[Text]:
    """An episode from its prompt to its end, a line or a turn at a time."""
    yield from _heading(episode)
    prompt = episode.get("input")
    for message in _mappings(prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]):
        yield from _message(message, "prompt")
    turn = 0
    for message in _mappings(episode.get("messages")):
        turn += message.get("role") == "assistant"
        yield from _message(message, _about(message, turn))
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
    yield Text(one_line(f"{episode.get('task_id')}, prompt {episode.get('prompt_id')}, {episode.get('kind')}"), "bold")
    reason = one_line(str(episode.get("reason", "")))
    if episode.get("status") == "set_aside":
        yield Text.assemble(("skipped: ", "bold red"), reason)
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


def _message(message: dict[str, Any], about: str) -> Iterator[Text]:
    role, text = str(message.get("role")), plain(message.get("content"))
    yield Text()
    yield Text.assemble((one_line(role), STYLES.get(role, "bold")), "  ", (one_line(about), "dim"))
    says_nothing = role == "user" and not text
    yield Text("(the conversation ends here)", "dim") if says_nothing else Text(visible(text))


def _about(message: dict[str, Any], turn: int) -> str:
    if message.get("role") == "assistant":
        return f"turn {turn}"
    if message.get("role") == "tool":
        failed = "failed: " if message.get("error") else ""
        return f"{failed}{message.get('name')} {plain(message.get('arguments'))}"
    about = f"reward {number(message.get('reward', 0.0))}"
    return f"{about}, {plain(message['metadata'])}" if message.get("metadata") else about


def plain(value: Any) -> str:
    """A text as it is; anything else as JSON, but for nothing."""
    return "" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def number(value: Any) -> str:
    """A number with four digits; a dash for what is none."""
    return f"{value:.4g}" if isinstance(value, int | float) else "–"


def _mappings(items: Any) -> list[dict[str, Any]]:
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []
