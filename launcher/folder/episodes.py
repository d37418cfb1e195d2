"""An index of the episodes of a run folder: a few columns in memory, and where each line begins.

A million episodes take about 60 MB; their texts stay in the files.
"""

from __future__ import annotations

import json
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from pydantic_core import from_json

from launcher.episodes.rows import FOLDERS, prompt_text
from launcher.folder.appended_lines import AppendedLines

ROW = np.dtype(
    [
        ("offset", "u8"), ("file", "u4"), ("task", "u4"), ("prompt", "u4"), ("step", "i4"),
        ("first", "i4"), ("last", "i4"), ("reward", "f4"), ("seconds", "f4"), ("tokens", "i4"), ("sampled", "i4"),
        ("turns", "u2"), ("calls", "u2"), ("reason", "u2"), ("generator", "u2"), ("flags", "u1"),
    ]
)  # fmt: skip
EVAL, SET_ASIDE, TOOL_ERROR, CUT, TOKENS = 1, 2, 4, 8, 16  # bits of `flags`
MOST_WORDS = 4096  # different reasons, and generators; further ones are "other"
BATCH = 2048  # lines between two looks of others at the index
RECORD = b', "input": '  # where the record begins after the header's fields
TOOL_ERRORS, HAS_TOKENS = b'"error": true', b'"token_ids": ['


class Words:
    """A number for each different word."""

    def __init__(self) -> None:
        self.all: list[str] = ["other"]
        self._numbers: dict[str, int] = {}

    def number(self, word: str) -> int:
        """The word's; 0 once there are too many."""
        if word not in self._numbers and len(self.all) < MOST_WORDS:
            self._numbers[word] = len(self.all)
            self.all.append(word)
        return self._numbers.get(word, 0)


class EpisodeIndex:
    """Rows of all episodes of a folder, by file and line; `update` adds what is new, and may run in a thread.

    Attributes:
        reasons, generators: the words that the columns of these names number.
        unreadable: lines that were no episodes.
        generation: changes whenever rows are added or removed.
        is_reading: whether `update` has more to read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._paths: list[Path] = []  # of files, by the number in `file`
        self._files: dict[str, int] = {}  # the other way round
        self._lines: dict[str, AppendedLines] = {}
        self._rows = np.empty(BATCH, ROW)
        self._count = 0
        self._lock = threading.Lock()
        self._updating = threading.Lock()
        self.reasons, self.generators = Words(), Words()
        self.unreadable = self.generation = 0
        self.is_reading = True

    def update(self) -> bool:
        """Read what is new; returns whether anything has changed."""
        with self._updating:
            before = self.generation
            present = {f"{path.parent.name}/{path.name}": path for path in _files(self._folder)}
            for name in self._lines.keys() - present.keys():
                # A held-out file loses its last suffix once it is complete: its rows are read again.
                del self._lines[name]
                self._remove(name)
            for name, path in present.items():
                self._read(name, path)
            self.is_reading = False
            return self.generation != before

    def rows(self) -> np.ndarray:
        """All rows, `ROW` [N]; they stay as they are while the index grows."""
        with self._lock:
            return self._rows[: self._count]

    def place(self, row: np.void) -> tuple[Path, int]:
        """File and offset of a row's line."""
        return self._paths[row["file"]], int(row["offset"])

    def find(self, name: str, offset: int) -> np.void | None:
        """The row of a line, by the file's name below the run folder; None where there is none."""
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
            header, has_errors = _header(line)
            versions = header.get("versions") or [-1]
            reward, set_aside = header.get("reward"), header.get("status") == "set_aside"
            flags = (
                EVAL * (header.get("kind") == "eval") | SET_ASIDE * set_aside | TOOL_ERROR * has_errors
                | CUT * bool(header.get("left_out")) | TOKENS * (HAS_TOKENS in line)
            )  # fmt: skip
            return (
                offset, file, word_hash(str(header["task_id"])), word_hash(str(header.get("prompt_id", ""))), step,
                _small(versions[0]), _small(versions[-1]),
                np.nan if set_aside or reward is None else float(reward), float(header.get("seconds") or 0.0),
                _small(header.get("tokens")), _small(header.get("model_tokens")), _small(header.get("turns"), 0xFFFF),
                _small(header.get("tool_calls"), 0xFFFF), self.reasons.number(str(header.get("reason", ""))[:200]),
                self.generators.number(str(header.get("generator", ""))[:80]), flags,
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
    """A number for an id: two of them may have the same, so whoever finds a row looks at its line too."""
    return zlib.crc32(word.encode("utf-8", "backslashreplace"))


def read_line(path: Path, offset: int) -> dict[str, Any] | None:
    """The record of a line; None where the file or the line is gone, or cut short."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return record_of(file.readline())
    except OSError:
        return None


def record_of(line: bytes) -> dict[str, Any] | None:
    """The record that a line holds; None where it is none."""
    try:
        record = _parsed(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def prompt_of(record: dict[str, Any], most: int) -> str:
    """The beginning of an episode's prompt."""
    return prompt_text(record.get("input", ""))[:most]


def _files(folder: Path) -> Iterator[Path]:
    """Files of episodes, oldest version first."""
    files = [path for name in FOLDERS for path in (folder / name).glob("*.jsonl*") if not path.name.endswith(".new")]
    numbered = [(int(version), path) for path in files if (version := path.name.partition(".")[0]).isdecimal()]
    yield from (path for _, path in sorted(numbered, key=lambda item: (item[0], item[1].parent.name, item[1].name)))


def _header(line: bytes) -> tuple[dict[str, Any], bool]:
    """The fields before the record, and whether a tool call in the record failed."""
    end = line.find(RECORD)
    if end > 0 and TOOL_ERRORS not in line and b'"left_out"' not in line:
        try:
            return from_json(line[:end] + b"}", cache_strings="keys"), False
        except ValueError:
            pass  # a field of the header itself is called so
    record = _parsed(line)
    messages = record.get("messages") or ()
    failed = any(isinstance(m, dict) and m.get("role") == "tool" and bool(m.get("error")) for m in messages)
    return record, failed


def _parsed(line: bytes) -> Any:
    try:
        return from_json(line, cache_strings="keys")
    except ValueError:
        return json.loads(line)  # slower; reads half a surrogate pair too


def _small(value: Any, most: int = 0x7FFFFFFF) -> int:
    return min(int(value or 0), most)
