"""An index of the episodes in a run folder: for each, a few columns in memory and the place of its line.

A million episodes take about 60 MB; their texts stay in the files.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from pydantic_core import from_json

from launcher.folder.appended_lines import AppendedLines

HELD_OUT = "validation_data"
FOLDERS = ("rollouts", HELD_OUT)

ROW = np.dtype(
    [
        ("offset", "u8"), ("prompt", "u8"), ("task", "u4"), ("file", "u4"), ("step", "i4"), ("first", "i4"),
        ("last", "i4"), ("reward", "f4"), ("seconds", "f4"), ("tokens", "i4"), ("sampled", "i4"), ("turns", "u2"),
        ("reason", "u2"), ("generator", "u2"), ("source", "u2"), ("flags", "u1"),
    ]
)  # fmt: skip
EVAL, SET_ASIDE, TOOL_ERROR, CUT, TOKENS, USER = 1, 2, 4, 8, 16, 32  # bits of `flags`
MOST_WORDS = 4096  # different reasons, generators or sources; further ones count as "other"
LARGEST = 3e38  # number in a column of float32
BATCH = 2048  # lines that are added to the index at once
RECORD = b', "input": '  # begins the record, after the header's fields
MESSAGES = b'"messages": ['
TOOL_ERRORS, USERS, HAS_TOKENS = b'"error": true', b'"role": "user"', b'"token_ids": ['


class Words:
    """Numbers for the different values of a column of text."""

    def __init__(self) -> None:
        self.all: list[str] = ["other"]
        self._numbers: dict[str, int] = {}

    def number(self, word: str) -> int:
        """The number of a word, which is added if it is new; 0 once there are too many."""
        if word not in self._numbers and len(self.all) < MOST_WORDS:
            self._numbers[word] = len(self.all)
            self.all.append(word)
        return self._numbers.get(word, 0)

    def find(self, word: str) -> list[int]:
        """The number of this word; if it has none, the numbers of the words that contain it. Case is ignored."""
        wanted, folded = word.casefold(), [own.casefold() for own in self.all]
        same = [i for i, own in enumerate(folded) if i and own == wanted]
        return same or [i for i, own in enumerate(folded) if i and wanted in own]


class EpisodeIndex:
    """One row for each episode in a folder; `update` adds new ones, and may run in a thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._paths: list[Path] = []  # by the number in column `file`
        self._files: dict[str, int] = {}  # number of each file, by folder and name
        self._lines: dict[str, AppendedLines] = {}
        self._rows = np.empty(BATCH, ROW)
        self._count = 0
        self._lock = threading.Lock()
        self._updating = threading.Lock()
        # The words to which the numbers in the columns of these names refer.
        self.reasons, self.generators, self.sources = Words(), Words(), Words()
        self.unreadable = 0  # lines that were not episodes
        self.generation = 0  # changes whenever rows are added or removed
        self.is_reading = True  # whether `update` has more to read

    def update(self) -> bool:
        """Read lines that were added; returns whether anything has changed."""
        with self._updating:
            before = self.generation
            present = {f"{path.parent.name}/{path.name}": path for path in _files(self._folder)}
            for name in self._lines.keys() - present.keys():
                # A held-out file loses its last suffix once it is complete; it is then read again under the new name.
                del self._lines[name]
                self._remove(name)
            for name, path in present.items():
                self._read(name, path)
            self.is_reading = False
            return self.generation != before

    def rows(self) -> np.ndarray:
        """All rows, `ROW` [N]; the array does not change while the index grows."""
        with self._lock:
            return self._rows[: self._count]

    @property
    def has_files(self) -> bool:
        return bool(self._lines)

    def place(self, row: np.void) -> tuple[Path, int]:
        return self._paths[row["file"]], int(row["offset"])

    def evaluated(self) -> np.ndarray:
        """The rows of complete evaluations, `ROW` [N], without tasks that failed on every attempt."""
        rows = self.rows()
        complete = [i for i, path in enumerate(self._paths) if path.parent.name == HELD_OUT and path.suffix == ".jsonl"]
        return rows[np.isin(rows["file"], complete) & ~np.isnan(rows["reward"])]

    def find(self, name: str, offset: int) -> np.void | None:
        """The row of the line at an offset, None if there is none; `name` is the file's path below the run folder."""
        rows = self.rows()
        hits = np.flatnonzero((rows["file"] == self._files.get(name, -1)) & (rows["offset"] == offset))
        return rows[hits[0]] if len(hits) else None

    def _read(self, name: str, path: Path) -> None:
        lines = self._lines.setdefault(name, AppendedLines(path))
        if lines.rewound():
            self._remove(name)
        if name not in self._files:
            self._files[name] = len(self._paths)
            self._paths.append(path)
        file, step = self._files[name], int(path.name.partition(".")[0])
        rows: list[tuple[Any, ...]] = []
        for offset, line in lines.read():
            row = self._row(line, offset, file, step)
            if row is None:
                self.unreadable += 1
            else:
                rows.append(row)
            if len(rows) >= BATCH:
                self.is_reading = True
                self._add(rows)
                rows = []
        self._add(rows)

    def _row(self, line: bytes, offset: int, file: int, step: int) -> tuple[Any, ...] | None:
        try:
            header, seen = _header(line)
            versions = header.get("versions") or [-1]
            prompt = str(header.get("prompt_id", ""))
            reward, set_aside = header.get("reward"), header.get("status") == "set_aside"
            flags = (
                EVAL * (header.get("kind") == "eval") | SET_ASIDE * set_aside | seen
                | CUT * bool(header.get("left_out")) | TOKENS * (HAS_TOKENS in line)
            )  # fmt: skip
            return (
                offset, word_hash(prompt), word_hash(str(header["task_id"])) & 0xFFFFFFFF, file, step,
                _small(versions[0], least=-1), _small(versions[-1], least=-1),
                np.nan if set_aside or reward is None else _real(reward), _real(header.get("seconds") or 0.0),
                _small(header.get("tokens")), _small(header.get("model_tokens")), _small(header.get("turns"), 0xFFFF),
                self.reasons.number(str(header.get("reason", ""))[:200]),
                self.generators.number(str(header.get("generator", ""))[:80]),
                self.sources.number(prompt.partition("/")[0][:200]), flags,
            )  # fmt: skip
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
            return None

    def _add(self, rows: list[tuple[Any, ...]]) -> None:
        if not rows:
            return
        with self._lock:
            needed = self._count + len(rows)
            if needed > len(self._rows):
                grown = np.empty(max(needed, len(self._rows) * 3 // 2), ROW)
                grown[: self._count] = self._rows[: self._count]
                self._rows = grown
            self._rows[self._count : needed] = np.array(rows, ROW)
            self._count = needed
            self.generation += 1

    def _remove(self, name: str) -> None:
        with self._lock:
            kept = self._rows[: self._count]
            kept = kept[kept["file"] != self._files.get(name, -1)]
            self._rows, self._count = kept.copy(), len(kept)
            self.generation += 1


def word_hash(word: str) -> int:
    """A 64-bit hash of an id."""
    return int.from_bytes(blake2b(word.encode("utf-8", "backslashreplace"), digest_size=8).digest())


def read_line(path: Path, offset: int) -> dict[str, Any] | None:
    """The record of the line at an offset; None if the file or the line is gone, or the line is cut off."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return record_of(file.readline())
    except OSError:
        return None


def record_of(line: bytes) -> dict[str, Any] | None:
    """The record that a line holds; None if it holds none."""
    try:
        record = _parsed(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def prompt_text(prompt: Any) -> str:
    """A prompt as text; for chat messages, the text of the last one."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[-1], dict):
        return str(prompt[-1].get("content", ""))
    return str(prompt)


def _files(folder: Path) -> Iterator[Path]:
    """Files of episodes, oldest version first."""
    files = [path for name in FOLDERS for path in (folder / name).glob("*.jsonl*") if not path.name.endswith(".new")]
    named = [(path.name.partition(".")[0], path) for path in files]
    numbered = [(int(name), path) for name, path in named if name.isdecimal() and len(name) <= 9]
    yield from (path for _, path in sorted(numbered))


def _header(line: bytes) -> tuple[dict[str, Any], int]:
    """The fields before the record, and the flags for failed tool calls and users in its messages."""
    end = line.find(RECORD)
    if end > 0 and TOOL_ERRORS not in line and b'"left_out"' not in line:
        start = line.find(MESSAGES, end)
        if start < 0 or line.find(USERS, start) < 0:
            try:
                return from_json(line[:end] + b"}", cache_strings="keys"), 0
            except ValueError:
                pass  # RECORD was found within the header
    record = _parsed(line)
    messages = [message for message in record.get("messages") or () if isinstance(message, dict)]
    has_failed = any(message.get("role") == "tool" and message.get("error") for message in messages)
    # A message with a request's number was sent by an agent, not by a simulated user.
    has_user = any(message.get("role") == "user" and "request" not in message for message in messages)
    return record, TOOL_ERROR * has_failed | USER * has_user


def _parsed(line: bytes) -> Any:
    try:
        return from_json(line, cache_strings="keys")
    except ValueError:
        return json.loads(line)  # slower, but accepts lone surrogates


def _small(value: Any, most: int = 0x7FFFFFFF, least: int = 0) -> int:
    """A whole number, at most `most`; raises `ValueError` below `least`, which no run writes."""
    number = int(value or 0)
    if number < least:
        raise ValueError(f"{number} is below {least}")
    return min(number, most)


def _real(value: Any) -> float:
    """A number; raises `ValueError` if it does not fit into a column."""
    number = float(value)
    if not abs(number) <= LARGEST:
        raise ValueError(f"{number} does not fit")
    return number
