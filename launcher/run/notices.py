"""Collects the warnings and errors in the logs of a run's processes, for the views of the run."""

from __future__ import annotations

import json
import re
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from common.errors import one_line

LINE = re.compile(r"\S+ \[(?:warning|error|critical) *\] (.*)")
ROLE = re.compile(r" ?\brole=\S+")
MAX_IN_VIEW = 3  # notices in the live view
DIFFERENT = 200  # kinds of notices; further kinds are not shown
AT_ONCE = 1 << 16  # newest bytes of a log that are read; earlier ones are skipped


@dataclass(slots=True)
class Notice:
    process: str
    line: str
    count: int = 1

    def __str__(self) -> str:
        return f"{self.process}: {self.line}" + (f" (×{self.count})" if self.count > 1 else "")


@dataclass(slots=True)
class Notices:
    """Follows the logs of the processes; lines that differ only in numbers are the same notice."""

    newest: deque[Notice] = field(default_factory=lambda: deque(maxlen=MAX_IN_VIEW))  # shown by the live view
    unseen: deque[Notice] = field(default_factory=lambda: deque(maxlen=DIFFERENT))  # not logged by the plain view yet
    _known: dict[str, Notice] = field(default_factory=dict)
    _read: dict[Path, int] = field(default_factory=dict)

    def follow(self, log: Path) -> None:
        """Follow a log from its end on, since warnings of an earlier start no longer matter."""
        self._read.setdefault(log, log.stat().st_size if log.exists() else 0)

    def read(self, process: str, log: Path) -> None:
        """Read the complete lines that were added to a log."""
        try:
            size = log.stat().st_size
            known = self._read.get(log, 0)
            # A log that shrank was emptied by `supervisor._bound`: read it from its start.
            begin = max(known if known <= size else 0, size - AT_ONCE)
            if begin >= size:
                return
            with log.open("rb") as file:
                file.seek(begin)
                added = file.read(size - begin)
        except OSError:
            return
        whole = added.rpartition(b"\n")[0]
        # A line that is longer than one read is skipped.
        self._read[log] = begin + len(whole) + 1 if whole else (size if len(added) == AT_ONCE else begin)
        for line in whole.decode(errors="replace").splitlines():
            text = _warning(line)
            if text:
                self._add(process, text)

    def _add(self, process: str, line: str) -> None:
        key = f"{process}: {re.sub(r'[0-9]+', '0', line)}"
        if key in self._known:
            self._known[key].count += 1
        elif len(self._known) < DIFFERENT:
            notice = self._known[key] = Notice(process, line)
            self.newest.append(notice)
            self.unseen.append(notice)


def _warning(line: str) -> str | None:
    """The warning or error in a log line, which is text or JSON; None for any other line."""
    if line.startswith("{"):
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):  # a reward or a tool may print what a model wrote
            return None
        if not isinstance(entry, dict) or entry.get("level") not in ("warning", "error", "critical"):
            return None
        details = (
            f" {key}={value!r}" for key, value in entry.items() if key not in ("event", "level", "timestamp", "role")
        )
        return one_line(str(entry.get("event", "")) + "".join(details))
    matched = LINE.match(line)
    return one_line(ROLE.sub("", matched[1])) if matched else None
