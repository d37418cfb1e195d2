"""Which episodes of an index are asked for, and in which order; words are looked for in the files, a part at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from launcher.folder.episodes import (
    CUT,
    EVAL,
    SET_ASIDE,
    TOKENS,
    TOOL_ERROR,
    EpisodeIndex,
    prompt_of,
    record_of,
    word_hash,
)

SORTS = ("step", "reward", "turns", "tokens", "sampled", "seconds")
KINDS = ("train", "eval", "set aside", "tool error", "cut", "with tokens")
MOST_OPEN = 64  # files at once
MOST_LINES = 100_000  # that one search reads at most
SEARCHED_BYTES = 48 << 20  # of files that one search reads at most
PROMPT_CHARS = 240


@dataclass(frozen=True, slots=True)
class Query:
    """What an episode must be like; None and "" stand for anything.

    Attributes:
        kind: of `KINDS`.
        reason, generator: whole words as the index has them.
        version: weight version that sampled any of it.
        text: words anywhere in it, in any case.
        prompt: id of the prompt.
        sort: of `SORTS`; -NAME: downwards.
    """

    kind: str = ""
    least: float | None = None
    most: float | None = None
    reason: str = ""
    generator: str = ""
    version: int | None = None
    first_step: int | None = None
    last_step: int | None = None
    text: str = ""
    prompt: str = ""
    sort: str = "-step"


def select(index: EpisodeIndex, rows: np.ndarray, query: Query) -> np.ndarray:
    """Positions of the rows that fit, in order; `text` is not looked at, nor `prompt` beyond its hash."""
    fits = np.ones(len(rows), bool)
    if query.kind == "train":
        fits &= rows["flags"] & EVAL == 0
    elif query.kind:
        bits = {"eval": EVAL, "set aside": SET_ASIDE, "tool error": TOOL_ERROR, "cut": CUT, "with tokens": TOKENS}
        fits &= rows["flags"] & bits.get(query.kind, 0) != 0
    if query.least is not None:
        fits &= rows["reward"] >= query.least
    if query.most is not None:
        fits &= rows["reward"] <= query.most
    if query.reason:
        fits &= rows["reason"] == _number(index.reasons.all, query.reason)
    if query.generator:
        fits &= rows["generator"] == _number(index.generators.all, query.generator)
    if query.version is not None:
        fits &= (rows["first"] <= query.version) & (query.version <= rows["last"])
    if query.first_step is not None:
        fits &= rows["step"] >= query.first_step
    if query.last_step is not None:
        fits &= rows["step"] <= query.last_step
    if query.prompt:
        fits &= rows["prompt"] == word_hash(query.prompt)
    positions = np.flatnonzero(fits)
    name = query.sort.removeprefix("-")
    keys = rows[name if name in SORTS else "step"][positions].astype(float)
    # What was set aside has no reward, and comes last in either order.
    return positions[np.argsort(-keys if query.sort.startswith("-") else keys, kind="stable")]


@dataclass(frozen=True, slots=True)
class Page:
    """Some episodes of a query.

    Attributes:
        rows: what a list shows of each.
        total: how many fit; None where a text is looked for, which is not known before the end.
        next: where the next page begins among those that fit without the text; None after the last.
    """

    rows: list[dict[str, Any]]
    total: int | None
    next: int | None


def page(index: EpisodeIndex, query: Query, start: int, count: int) -> Page:
    """`count` episodes from position `start` of the query's order on; fewer where a text is rare."""
    rows = index.rows()
    positions = select(index, rows, query)
    needle = query.text.casefold()
    raw = _as_in_json(needle)
    shown: list[dict[str, Any]] = []
    budget, at = SEARCHED_BYTES, start
    with Lines() as lines:
        for row in rows[positions[start : start + MOST_LINES]]:
            if len(shown) >= count or budget <= 0:
                break
            at += 1
            line = lines.read(*index.place(row))
            budget -= len(line) if needle else 0
            # Most lines are passed over without being parsed.
            if raw and raw not in line.lower():
                continue
            record = record_of(line)
            if record is None or (query.prompt and record.get("prompt_id") != query.prompt):
                continue
            if not needle or any(needle in text.casefold() for text in texts(record)):
                shown.append(listed(index, row, record))
    return Page(shown, None if needle or query.prompt else len(positions), at if at < len(positions) else None)


class Lines:
    """Reads single lines of files, the last few of which stay open meanwhile."""

    def __init__(self) -> None:
        self._files: dict[Path, BinaryIO] = {}

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def read(self, path: Path, offset: int) -> bytes:
        """The line at an offset; empty where the file is gone."""
        try:
            if path not in self._files:
                if len(self._files) >= MOST_OPEN:
                    self._files.pop(next(iter(self._files))).close()
                self._files[path] = path.open("rb")
            self._files[path].seek(offset)
            return self._files[path].readline()
        except OSError:
            return b""


def _as_in_json(text: str) -> bytes:
    """A text as it stands in a line of JSON, in any case; b"" where it may stand there in several ways."""
    plain = text.isascii() and text.isprintable() and '"' not in text and "\\" not in text
    return text.encode() if plain else b""


def listed(index: EpisodeIndex, row: np.void, record: dict[str, Any]) -> dict[str, Any]:
    """An episode as a list shows it."""
    path, offset = index.place(row)
    return {
        "file": f"{path.parent.name}/{path.name}",
        "offset": offset,
        "step": int(row["step"]),
        "task": str(record.get("task_id", "")),
        "prompt_id": str(record.get("prompt_id", "")),
        "prompt": prompt_of(record, PROMPT_CHARS),
        "reward": None if np.isnan(row["reward"]) else float(row["reward"]),
        "turns": int(row["turns"]),
        "tokens": int(row["tokens"]),
        "sampled": int(row["sampled"]),
        "seconds": round(float(row["seconds"]), 3),
        "reason": str(record.get("reason", ""))[:PROMPT_CHARS],
        "generator": str(record.get("generator", "")),
        "flags": [name for name, bit in FLAGS.items() if row["flags"] & bit],
    }


FLAGS = {"eval": EVAL, "set aside": SET_ASIDE, "tool error": TOOL_ERROR, "cut": CUT, "tokens": TOKENS}


def texts(value: Any) -> Iterator[str]:
    """All texts in a record, but for the names of its fields."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from texts(item)
    elif isinstance(value, list) and not (value and isinstance(value[0], int | float)):
        for item in value:
            yield from texts(item)


def _number(words: list[str], word: str) -> int:
    return words.index(word) if word in words else -1
