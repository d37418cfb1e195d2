"""What episodes were like: how they ended, how long they took, their turns and tool calls."""

from __future__ import annotations

import re
from collections import Counter

from common.messages import SampleHeader

ENDINGS = ("stop", "user", "length", "max_assistant_turns", "max_user_turns", "max_seconds")  # EpisodeRunner's
CUT_OFF = ("length", "max_seconds")
OTHER = "other"
MAX_KINDS = 16  # of reasons for which tasks are set aside
PREFIXES = {
    "prompt has": "PromptTooLong",
    "given up after": "GeneratorsLost",
    "its result cannot be counted": "InvalidResult",
    "it was cancelled": "Cancelled",
}


class EpisodeMetrics:
    """Counts the training episodes between two batches; made anew for each."""

    def __init__(self) -> None:
        self._endings: Counter[str] = Counter()
        self._episodes = self._turns = self._calls = self._errors = 0
        self._seconds = self._longest = 0.0

    def add(self, header: SampleHeader) -> None:
        """An episode was counted."""
        self._episodes += 1
        self._endings[header.reason if header.reason in ENDINGS else OTHER] += 1
        self._turns += header.turns
        self._calls += header.tool_calls
        self._errors += header.tool_errors
        self._seconds += header.seconds
        self._longest = max(self._longest, header.seconds)

    def values(self) -> dict[str, float]:
        """Means and shares; empty if there was no episode."""
        n = self._episodes
        if n == 0:
            return {}
        values = {
            "response_length/clip_ratio": sum(self._endings[reason] for reason in CUT_OFF) / n,
            "num_turns/mean": self._turns / n,
            "tool_calls/mean": self._calls / n,
            "episode/seconds_mean": self._seconds / n,
            "episode/seconds_max": self._longest,
        }
        if self._calls:
            values["tool_calls/error_ratio"] = self._errors / self._calls
        values |= {f"ending/{reason}": count / n for reason, count in self._endings.items()}
        return values


class SetAsideKinds:
    """Names the kinds of reasons for which tasks are set aside; no more than `MAX_KINDS`, as each has a counter."""

    def __init__(self) -> None:
        self._kinds: set[str] = set()

    def kind(self, reason: str) -> str:
        """The name of the exception that a reason begins with, or another short word."""
        match = re.match(r"([A-Za-z_]\w{0,40}):", reason, re.ASCII)
        kind = match[1] if match else next((PREFIXES[words] for words in PREFIXES if reason.startswith(words)), OTHER)
        if len(self._kinds) >= MAX_KINDS and kind not in self._kinds:
            return OTHER
        self._kinds.add(kind)
        return kind
