"""Prepares one episode for the page: turns, tool calls, rewards, and facts about each token."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import visible
from launcher.folder.episodes import record_of

MOST_CHARS = 200_000  # of one text
MOST_TOKENS = 20_000
MOST_ITEMS = 2_000  # of a list
MOST_LOG_RATIO = 20.0
MOST_BATCHES = 64  # batches searched for an episode, from its dispatch on
RECORD_ONLY = {
    "token_ids", "model_spans", "logprobs", "version_spans", "row_lengths", "input", "output", "messages", "requests",
    "scored", "refusals", "lost",
}  # fmt: skip


def episode_view(record: dict[str, Any], model: str | None, trained: list[dict[str, Any]]) -> dict[str, Any]:
    """An episode's record as plain, harmless data: characters that move the cursor or reorder text are escaped.

    Args:
        model: the model's folder, whose tokenizer decodes the tokens.
        trained: the learner's records of the episode's rows, if there are any.
    """
    facts = {name: value for name, value in record.items() if name not in RECORD_ONLY}
    prompt = record.get("input")
    messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    return {
        "facts": shown(facts),
        "prompt": [shown(message) for message in mappings(messages)],
        "messages": [shown(one) for one in mappings(record.get("messages"))],
        "scored": [[name, shown(text)] for name, text in scored_facts(record)],
        "requests": [visible(line) for line in request_lines(record)],
        "output": shown(record.get("output", "")),
        "advantage": _advantage(record),
        "tokens": tokens(record, model),
        "trained": trained_view(record, trained),
    }


def training_lines(folder: Path, episode: dict[str, Any]) -> list[dict[str, Any]]:
    """The learner's records of the rows of an episode that it trained on, each with the batch's `version`."""
    task_id, version = episode.get("task_id"), episode.get("version")
    if not isinstance(task_id, str) or not isinstance(version, int) or episode.get("kind") != "train":
        return []
    # Batches from before the task's dispatch cannot contain it.
    by_batch: dict[int, list[Path]] = defaultdict(list)
    for path in (folder / "training_data").glob("*.jsonl"):
        batch = path.name.partition(".")[0]
        if batch.isdecimal() and int(batch) >= version:
            by_batch[int(batch)].append(path)
    start = f'{{"task_id": {json.dumps(task_id)},'.encode()
    for number in sorted(by_batch)[:MOST_BATCHES]:
        records: list[dict[str, Any]] = []
        for path in by_batch[number]:
            with suppress(OSError), path.open("rb") as file:
                records += [record for line in file if line.startswith(start) and (record := record_of(line))]
        if records:
            return [record | {"version": number} for record in records]
    return []


def mappings(items: Any) -> list[dict[str, Any]]:
    """The mappings in a list; empty if a record has something else there."""
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []


def shown(value: Any, depth: int = 8) -> Any:
    """The value with its strings escaped, and cut to a size that a page can show."""
    if isinstance(value, str):
        rest = len(value) - MOST_CHARS
        return visible(value[:MOST_CHARS]) + (f"\n… {rest:,} more characters" if rest > 0 else "")
    if isinstance(value, dict):
        items = list(value.items())[:MOST_ITEMS]
        return {visible(str(name)): shown(item, depth - 1) for name, item in items} if depth else "…"
    if isinstance(value, list):
        return [shown(item, depth - 1) for item in value[:MOST_ITEMS]] if depth else "…"
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value


def tokens(record: dict[str, Any], model: str | None) -> dict[str, Any] | None:
    """Text, log-prob, version and turn of each token; None if no tokens were kept or the record is inconsistent.

    Log-prob, version and turn are None for tokens that the model did not sample.
    """
    try:
        ids = [int(token) for token in record["token_ids"]]
        versions = [version for version, start, end in record["version_spans"] for _ in range(start, end)]
        turns = [turn for turn, (start, end) in enumerate(record["model_spans"]) for _ in range(start, end)]
        columns = {"logprobs": record["logprobs"], "versions": versions, "turns": turns}
        by_token = {name: _by_token(record, values) for name, values in columns.items()}
        rows = row_starts(record)
    except (LookupError, TypeError, ValueError):
        return None
    decode = decoder(model) if model else None
    return {
        "texts": [visible(decode(token)) if decode else f"{token} " for token in ids[:MOST_TOKENS]],
        "ids": ids[:MOST_TOKENS],
        **by_token,
        "rows": rows,
        "left_out": max(0, len(ids) - MOST_TOKENS),
        "decoded": decode is not None,
    }


def sampled_positions(record: dict[str, Any]) -> list[int]:
    """The positions of the tokens that the model sampled."""
    return [i for start, end in record["model_spans"] for i in range(start, end)]


def row_starts(record: dict[str, Any]) -> list[int]:
    """Where each row of an episode's tokens starts; raises `ValueError` if rows and tokens disagree."""
    tokens = len(record["token_ids"])
    *starts, end = accumulate(record.get("row_lengths") or [tokens], initial=0)
    if end != tokens:
        raise ValueError(f"rows of {end} tokens, but {tokens} tokens")
    return starts


def scored_facts(record: dict[str, Any]) -> list[tuple[str, str]]:
    """The result of an agent as (name, text) pairs: its answer and its or its tests' reward, or its failure."""
    scored = record.get("scored")
    if not isinstance(scored, dict):
        return []
    answer, reward, failure = (scored.get(name) for name in ("answer", "reward", "failure"))
    if failure:
        return [("the agent failed:", str(failure))]
    parts = record.get("parts")
    giver = "the tests'" if isinstance(parts, dict) and "container" in parts else "the agent's"
    rewards = [(f"{giver} reward:", f"{reward:g}")] if isinstance(reward, int | float) else []
    return [*rewards, ("the agent's answer:", str(answer))]


def request_lines(record: dict[str, Any]) -> list[str]:
    """An agent's requests and their outcomes, as a tree: requests that continue another stand below it.

    The first continuation has the same indentation; further ones, which are forks, are indented.
    """
    requests = mappings(record.get("requests"))[:MOST_ITEMS]
    following: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for request in requests:
        following[str(request.get("continues"))].append(request)
    waiting = [(request, "") for request in reversed(following["None"])]
    lines = []
    while waiting:
        request, margin = waiting.pop()
        lines.append(margin + _request_line(request))
        first, *forks = following.pop(str(request.get("request")), ()) or (None,)
        # Forks stand directly below the request that they continue; below them, the conversation continues.
        waiting += [(first, margin)] if first else []
        waiting += [(fork, f"{margin}   ") for fork in reversed(forks)]
    refusals = mappings(record.get("refusals"))[:MOST_ITEMS]
    lines += [f"lost: {record['lost']}"] if record.get("lost") else []
    return lines + [
        f"refused: {one.get('times')} × {one.get('status')} for {one.get('path')}: {one.get('message')}"
        for one in refusals
    ]


def _request_line(request: dict[str, Any]) -> str:
    kept, before = request.get("kept"), request.get("continues")
    prompt = f"{request.get('request')}: {request.get('prompt')} tokens" + (
        f", {kept} of them kept from {before}" if before is not None else ""
    )
    if "sampled" not in request:
        return f"{prompt}; dropped"
    row = request.get("row")
    quotes = request.get("quotes")  # whatever a record has there
    apart = " (it quotes the task, under other instructions)" if quotes is True else ""
    apart = " (it shares nothing)" if quotes is False else apart
    became = f"not trained on{apart}" if row is None else f"row {row + 1}" if isinstance(row, int) else "?"
    return f"{prompt}; {request['sampled']} sampled ({request.get('ended')}), {became}"


def trained_view(record: dict[str, Any], trained: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Advantages by turn, ratio and entropy of each token [T]; None if the learner's records do not fit the tokens.

    With a critic, the view has each token's advantage too, and the advantages by turn are the tracker's. The ratio is
    the token's probability under the policy just before the optimizer step that trained on it, divided by its
    probability when it was sampled.
    """
    try:
        rows = sorted(trained, key=lambda row: int(row.get("row", 0)))
        names = ["logprobs", "entropies", *(["token_advantages"] if "token_advantages" in rows[0] else [])]
        columns = {name: [one for row in rows for one in row[name]] for name in names}
        rollout = zip(record["logprobs"], columns.pop("logprobs"), strict=True)
        columns["ratios"] = [math.exp(min(current - sampled, MOST_LOG_RATIO)) for sampled, current in rollout]
        by_token = {name: _by_token(record, map(_finite, values)) for name, values in columns.items()}
        advantages = [_finite(advantage) for advantage in rows[0]["advantages"]]
        if len(advantages) not in (1, len(record["model_spans"])):
            return None
        facts = {"version": int(rows[0]["version"]), "mini_batch": int(rows[0]["mini_batch"])}
    except (LookupError, TypeError, ValueError):
        return None
    return {**facts, "advantages": advantages, **by_token}


def _by_token(record: dict[str, Any], values: Iterable[Any]) -> list[Any]:
    """The values of the sampled tokens at their positions, None at the other tokens; of the first `MOST_TOKENS`."""
    by_token: list[Any] = [None] * len(record["token_ids"])
    for i, value in zip(sampled_positions(record), values, strict=True):
        by_token[i] = value
    return by_token[:MOST_TOKENS]


def _finite(value: float) -> float | None:
    return round(value, 5) if math.isfinite(value) else None


@lru_cache(4)
def decoder(model: str) -> Callable[[int], str] | None:
    """A function from token id to text; None if the model's tokenizer is not on this machine."""
    try:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
    except Exception:
        # Whatever is wrong with the tokenizer, token ids are shown instead.
        return None
    return lru_cache(65536)(lambda token: str(tokenizer.decode([token], skip_special_tokens=False)))


def _advantage(record: dict[str, Any]) -> dict[str, Any] | None:
    """The reward minus the prompt's value before it: the advantage before it is normalized over the batch."""
    reward, value = record.get("reward"), record.get("value")
    if not isinstance(reward, int | float) or not isinstance(value, int | float) or record.get("kind") == "eval":
        return None
    return {"value": value, "difference": round(reward - value, 6)}
