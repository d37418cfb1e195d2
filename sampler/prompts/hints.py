"""Hints about rows that can be used but look unintended; each names the setting that probably fixes them."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from common.config import Source
from common.config.data import CONTINUE
from sampler.prompts.chat import Messages
from sampler.prompts.row import BadRow, CheckedRow, Rows

ROLES = {"system", "developer", "user", "assistant", "tool", "function", "ipython"}
# Where the turns of a conversation begin or end in the templates of common models.
_TURNS = re.compile(r"<\|[A-Za-z_]+\|>|<｜[^｜<>]+｜>|</?(?:start|end)_of_turn>|\[/?INST\]")
_IMAGE = re.compile(r"<image>|<\|image[^<>|]*\|>|<video>|<audio>")
_KEY = r"""(?=.*["'](?:{})["']\s*:)"""
_CONVERSATION = re.compile(rf"\s*\[?\s*\{{{_KEY.format('role|from')}{_KEY.format('content|value')}", re.DOTALL)
_MEDIA = re.compile(r"(images?|videos?|audios?|pixel_values)", re.IGNORECASE)


@dataclass(slots=True)
class _Seen:
    """How many rows a hint is about, the first of them, and what was seen in it."""

    first: int
    detail: str
    rows: int = 0


class Hints:
    """Collects hints about the rows of one source."""

    def __init__(self, source: Source, rows: Rows) -> None:
        self._source, self._rows = source, rows
        self._seen: dict[str, _Seen] = {}
        self._different: Counter[str] = Counter()  # by column: rows that differ in it from an earlier one

    def add(self, row: CheckedRow) -> None:
        """Check a row that can be used, or that repeats the prompt of an earlier one."""
        if row.earlier is not None:
            self._compare(row, row.earlier)
        if row.problem is not None:
            return
        if isinstance(row.prompt, str):
            contents = [row.prompt]
            self._look_at_text(row.prompt, row.number)
        else:
            contents = [str(message["content"]) for message in row.prompt]
            self._look_at_messages(row.prompt, row.number)
        if image := next(filter(None, map(_IMAGE.search, contents)), None):
            self._note("image", row.number, image.group())
        elif column := next(
            (name for name, value in (row.row or {}).items() if value and _MEDIA.fullmatch(name)), None
        ):
            self._note("image", row.number, f"column {column!r}")
        if (row.row or {}).get("tools"):
            self._note("tools", row.number)
        if _is_rounded(row.answer):
            self._note("rounded", row.number, str(row.answer))
        if isinstance(row.answer, bytes):
            self._note("bytes", row.number, repr(row.answer)[:80])

    def lines(self) -> list[str]:
        """One line for each kind of hint."""
        return [
            f"{seen.rows:,} rows (first: {self._rows.where(seen.first)}): {self._text(kind, seen.detail)}"
            for kind, seen in self._seen.items()
        ]

    def _look_at_text(self, text: str, number: int) -> None:
        if (turn := _TURNS.search(text)) and not self._source.prompt_markup:
            self._note("turns", number, turn.group())
        elif _CONVERSATION.match(text):
            self._note("json", number)

    def _look_at_messages(self, messages: Messages, number: int) -> None:
        if messages[-1]["role"] == "assistant" and not self._source.template_options.get(CONTINUE):
            self._note("prefill", number)
        if self._source.system_prompt:
            self._note("system", number)
        if unknown := next((message["role"] for message in messages if message["role"] not in ROLES), None):
            self._note("role", number, unknown)

    def _compare(self, row: CheckedRow, number: int) -> None:
        """Note the columns in which a row differs from an earlier one with the same prompt."""
        earlier = self._rows.row_or_problem(number)
        if self._source.id_column is not None or isinstance(earlier, BadRow) or row.row is None:
            return
        different = [name for name, value in row.row.items() if not _is_same(earlier.get(name), value)]
        if different:
            self._different.update(different)
            self._note("same", row.number)

    def _note(self, kind: str, number: int, detail: str = "") -> None:
        self._seen.setdefault(kind, _Seen(number, detail)).rows += 1

    def _text(self, kind: str, detail: str) -> str:
        prompts, answers = f"column {self._source.prompt_column!r}", f"column {self._source.answer_column!r}"
        if kind == "same":
            columns = [name for name, count in self._different.most_common() if count == self._seen[kind].rows]
            shown = ", ".join(map(repr, columns or self._different))
            chosen = next((name for name in columns if name != self._source.answer_column), "COLUMN")
            return (
                f"the prompt repeats that of an earlier row, but {shown} differs; to keep such rows, set "
                f"data.id_column={chosen}, or another column with a unique id"
            )
        return {
            "turns": f"the prompt has {detail!r}, as if it was rendered already; it is shown as text within a user's "
            "message: name a column with the question or with chat messages by data.prompt_column, or set "
            "data.prompt_markup=true if the markup is meant",
            "json": f"the prompt is text that reads as chat messages, and is shown as it stands: write a list into "
            f"{prompts}, not text (json.loads), or name another by data.prompt_column",
            "image": f"{detail} stands for an image, video or sound, but SPO's models read only text: leave such rows "
            "out, or name a column of text by data.prompt_column",
            "tools": "column 'tools' is not shown to the model, whose tools are those of episode.tools, the same for "
            "all rows of a source; only an agent or a tool of your own may read it",
            "rounded": f"{detail} in {answers} looks like a rounded 32-bit number: store it as text or with 64 bits, "
            "or name another column by data.answer_column",
            "bytes": f"{detail} in {answers} is bytes, which no reward of SPO's finds equal to a text: store it as "
            "text, or name another column by data.answer_column",
            "prefill": "the last message is the assistant's, after which the model begins another; to have it "
            "continued, set data.template_options.continue_final_message=true (with data.prompt_markup=true for "
            "tags such as <think>), or leave it out",
            "system": "data.system_prompt is added only to text prompts, and these are chat messages: give them "
            "a system message, or remove data.system_prompt",
            "role": f"a message has the role {detail!r}, which models are not trained with: name it user, assistant or "
            "system, or name another column by data.prompt_column",
        }[kind]


def _is_same(value: Any, other: Any) -> bool:
    """Whether values of two rows are equal; so is NaN, which is not equal to itself."""
    return bool(value == other) or repr(value) == repr(other)


def _is_rounded(answer: Any) -> bool:
    """Whether a number looks like a shorter decimal number that was stored as float32."""
    if not isinstance(answer, float) or not np.isfinite(answer):
        return False
    with np.errstate(over="ignore"):
        short = np.float32(answer)
    return float(short) == answer and float(str(short)) != answer
