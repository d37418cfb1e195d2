"""Finds and sorts the episodes that match a query; `spo episodes` and the page share this query language."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from common.errors import UserError, one_line
from launcher.folder.episodes import (
    CUT,
    EVAL,
    SET_ASIDE,
    TOKENS,
    TOOL_ERROR,
    USER,
    EpisodeIndex,
    prompt_text,
    record_of,
    word_hash,
)

FLAGS = {"eval": EVAL, "skipped": SET_ASIDE, "tool error": TOOL_ERROR, "user": USER, "cut": CUT, "tokens": TOKENS}
KINDS = {
    "train": 0, "eval": EVAL, "skipped": SET_ASIDE, "tool error": TOOL_ERROR, "failed": SET_ASIDE | TOOL_ERROR,
    "cut": CUT, "with tokens": TOKENS,
}  # fmt: skip
SORTS = ("step", "reward", "turns", "tokens", "sampled", "seconds", "prompt")
MOST_OPEN = 64  # files at once
SEARCHED_BYTES = 48 << 20  # the most that one search reads
PROMPT_CHARS = 240
# The id of a prompt whose row has none (`sampler/prompts/prompt_set.py`).
HASHED = re.compile(r"(.*/)?[0-9a-f]{16}", re.DOTALL)
COMPARISON = re.compile(r"\s*(<=|>=|==|=|!=|<|>)?\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)\s*", re.IGNORECASE)
STEPS = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")
OPERATORS: dict[str, Callable[[Any, float], Any]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "=": operator.eq, "==": operator.eq,
    "!=": operator.ne,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Query:
    """Conditions on episodes; "" means no condition. An invalid field raises `UserError`."""

    text: str = ""  # words anywhere in the record; case is ignored
    kind: str = ""  # one of `KINDS`; `failed`: skipped after its last attempt, or with a tool call that failed
    reward: str = ""  # comparisons such as `<0.5`, `>=1` or 0, with commas between several
    tokens: str = ""  # comparisons, like `reward`
    step: str = ""  # weight version at dispatch, such as 20 or 10-30
    version: str = ""  # a weight version that sampled at least one of its tokens
    prompt: str = ""  # the prompt's id, or words in the prompt if no prompt has that id
    source: str = ""  # data source, if there are several
    reason: str = ""  # why the episode ended: the whole reason, or words of it if no episode has this reason
    generator: str = ""
    task: str = ""
    sort: str = "-step"  # one of `SORTS`; -NAME: descending. Episodes without a reward come last in either order

    def __post_init__(self) -> None:
        comparisons("reward", self.reward)
        comparisons("tokens", self.tokens)
        versions("step", self.step)
        versions("version", self.version)
        if self.kind not in ("", *KINDS):
            raise UserError(f"kind {self.kind!r} is unknown; allowed: {', '.join(KINDS)}")
        if self.sort.removeprefix("-") not in SORTS:
            allowed = f"{', '.join(SORTS)}, each also with - for descending order"
            raise UserError(f"sort {self.sort!r} is unknown; allowed: {allowed}")


FIELDS = tuple(field.name for field in fields(Query))


def comparisons(name: str, text: str) -> list[tuple[Callable[[Any, float], Any], float]]:
    """Parse comparisons that are separated by commas; raises `UserError` if one is invalid."""
    tests = []
    for part in text.split(",") if text else ():
        match = COMPARISON.fullmatch(part)
        if not match:
            raise UserError(f"{name} {text!r} is not a comparison; write for example '<0.5', '>=1' or 0 (in quotes)")
        tests.append((OPERATORS[match[1] or "="], float(match[2])))
    return tests


def versions(name: str, text: str) -> tuple[int, int] | None:
    """Parse a version such as 20 or a range such as 10-30; raises `UserError` if the text is neither."""
    match = STEPS.fullmatch(text)
    if text and not match:
        raise UserError(f"{name} {text!r} is neither a version nor a range; write for example 20 or 10-30")
    return (int(match[1]), int(match[2] or match[1])) if match else None


def select(index: EpisodeIndex, rows: np.ndarray, query: Query) -> np.ndarray:
    """Positions of the rows that may match, in the query's order; words in text and prompt are not checked yet."""
    fits = np.ones(len(rows), bool)
    if query.kind == "train":
        fits &= rows["flags"] & EVAL == 0
    elif query.kind:
        fits &= rows["flags"] & KINDS[query.kind] != 0
    for column in ("reward", "tokens"):
        for compare, bound in comparisons(column, getattr(query, column)):
            fits &= compare(rows[column], bound)
    if query.reward:
        fits &= ~np.isnan(rows["reward"])
    if steps := versions("step", query.step):
        fits &= (rows["step"] >= steps[0]) & (rows["step"] <= steps[1])
    if sampled_by := versions("version", query.version):
        fits &= (rows["first"] <= sampled_by[1]) & (sampled_by[0] <= rows["last"])
    if query.reason:
        # Reasons without a number of their own (0, "other") are compared later, in the lines.
        fits &= np.isin(rows["reason"], [0, *index.reasons.find(query.reason)])
    if query.generator:
        fits &= np.isin(rows["generator"], index.generators.find(query.generator))
    if query.source:
        fits &= np.isin(rows["source"], index.sources.find(query.source))
    if query.task:
        fits &= rows["task"] == word_hash(query.task) & 0xFFFFFFFF
    if query.prompt and is_prompt_id(rows, query.prompt):
        fits &= rows["prompt"] == word_hash(query.prompt)
    positions = np.flatnonzero(fits)
    keys = rows[query.sort.removeprefix("-")][positions].astype(float)
    return positions[np.argsort(-keys if query.sort.startswith("-") else keys, kind="stable")]


def is_prompt_id(rows: np.ndarray, prompt: str) -> bool:
    return bool((rows["prompt"] == word_hash(prompt)).any())


@dataclass(frozen=True, slots=True)
class EpisodePage:
    """One page of a query's episodes."""

    rows: list[dict[str, Any]]  # the episodes, as `episode_row` makes them
    total: int | None  # how many match; None if words are searched for, since then it is known only at the end
    next: int | None  # where the next page begins among the rows of `select`; None after the last page


def page(index: EpisodeIndex, query: Query, start: int, count: int, most_bytes: float = SEARCHED_BYTES) -> EpisodePage:
    """Up to `count` episodes from position `start` on; fewer if `most_bytes` were read before that many matched."""
    rows = index.rows()
    positions = select(index, rows, query)
    words = "" if is_prompt_id(rows, query.prompt) else query.prompt.casefold()
    needle = query.text.casefold()
    raw = [text for text in map(_as_in_json, (needle, words)) if text]
    listed: list[dict[str, Any]] = []
    at = start
    with Lines() as lines:
        for row in rows[positions[start:]]:
            if len(listed) >= count or most_bytes <= 0:
                break
            at += 1
            line = lines.read(*index.place(row))
            most_bytes -= len(line) + 1
            # Lines without the words are skipped before they are parsed.
            if raw and any(text not in line.lower() for text in raw):
                continue
            record = record_of(line)
            if record is None or (words and words not in prompt_text(record.get("input", "")).casefold()):
                continue
            if not row["reason"] and query.reason.casefold() not in str(record.get("reason", "")).casefold():
                continue
            if not needle or any(needle in text.casefold() for text in texts(record)):
                listed.append(episode_row(index, row, record))
    return EpisodePage(listed, None if needle or words else len(positions), at if at < len(positions) else None)


def prompt_texts(index: EpisodeIndex, ids: Iterable[str]) -> dict[str, str]:
    """The beginning of each prompt's text by its id, for ids that are hashes and of which an episode is kept."""
    rows = index.rows()
    texts: dict[str, str] = {}
    with Lines() as lines:
        for name in filter(HASHED.fullmatch, ids):
            kept = np.flatnonzero(rows["prompt"] == word_hash(name))
            record = record_of(lines.read(*index.place(rows[kept[-1]]))) if len(kept) else None
            if record and (text := one_line(prompt_text(record.get("input", ""))[:PROMPT_CHARS])):
                texts[name] = text
    return texts


def episode_row(index: EpisodeIndex, row: np.void, record: dict[str, Any]) -> dict[str, Any]:
    path, offset = index.place(row)
    return {
        "file": f"{path.parent.name}/{path.name}",
        "offset": offset,
        "step": int(row["step"]),
        "task": str(record.get("task_id", "")),
        "prompt_id": str(record.get("prompt_id", "")),
        "prompt": prompt_text(record.get("input", ""))[:PROMPT_CHARS],
        "response": str(record.get("output") or "")[:PROMPT_CHARS],
        "reward": None if np.isnan(row["reward"]) else float(f"{row['reward']:.7g}"),
        "turns": int(row["turns"]),
        "tokens": int(row["tokens"]),
        "sampled": int(row["sampled"]),
        "seconds": round(float(row["seconds"]), 3),
        "versions": [int(row["first"]), int(row["last"])],
        "reason": str(record.get("reason", ""))[:PROMPT_CHARS],
        "generator": str(record.get("generator", "")),
        "flags": [name for name, bit in FLAGS.items() if row["flags"] & bit],
    }


class Lines:
    """Reads single lines of files, and keeps the files opened last open."""

    def __init__(self) -> None:
        self._files: dict[Path, BinaryIO] = {}

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def read(self, path: Path, offset: int) -> bytes:
        """The line at an offset; empty if the file is gone."""
        try:
            if path not in self._files:
                if len(self._files) >= MOST_OPEN:
                    self._files.pop(next(iter(self._files))).close()
                self._files[path] = path.open("rb")
            self._files[path].seek(offset)
            return self._files[path].readline()
        except OSError:
            return b""


def texts(value: Any) -> Iterator[str]:
    """Yield all strings in a record, except field names."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from texts(item)
    elif isinstance(value, list) and not (value and isinstance(value[0], int | float)):
        for item in value:
            yield from texts(item)


def _as_in_json(text: str) -> bytes:
    """The bytes of a lower-case text in a line of JSON; b"" if JSON can write it in several ways."""
    plain = text.isascii() and text.isprintable() and '"' not in text and "\\" not in text
    return text.encode() if plain else b""
