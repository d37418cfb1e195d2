"""Rows of a data set as prompts: columns looked up, answers read, ids made, and what is wrong with a row said."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import msgpack
import numpy as np

from common.answers import is_missing
from common.config import Source
from common.payload import json_line
from common.unpack import MAX_BYTES, MAX_VALUES, Unreadable, check
from sampler.bad_row import BadRow
from sampler.rows import Rows

Messages = list[dict[str, Any]]

# A task names the answer beside its row, so that it may hold a part of it twice.
MAX_ROW_BYTES, MAX_ROW_VALUES = MAX_BYTES // 2 - (1 << 16), MAX_VALUES // 2 - 256

# A number with commas between thousands, as GSM8K writes it.
THOUSANDS = re.compile(r"-?\d{1,3}(,\d{3})+(\.\d+)?")


@dataclass(slots=True)
class CheckedRow:
    """A row, and what is wrong with it.

    Attributes:
        number: position in the data.
        row: None where it cannot be read.
        prompt_id, prompt, answer: set where nothing is wrong, and of duplicates.
        problem: why the row cannot be used; None where it can.
    """

    number: int
    row: dict[str, Any] | None = None
    prompt_id: str = ""
    prompt: str | Messages = ""
    answer: Any = None
    problem: BadRow | None = None


def check_rows(rows: Rows, source: Source) -> Iterator[CheckedRow]:
    """Every row in order; a prompt (or an id) that came before is a problem of the later row."""
    seen: set[str] = set()
    for number, row in enumerate(rows):
        checked = CheckedRow(number)
        try:
            if isinstance(row, BadRow):
                raise row
            checked.row = row
            checked.prompt, checked.answer = read_prompt(row, source), read_answer(row, source)
            check_can_be_sent(row)
            checked.prompt_id = _row_id(row, checked.prompt, source)
            if checked.prompt_id in seen:
                same = "the same prompt as an earlier row" if source.id_column is None else "an id used before"
                raise BadRow(same, "duplicate")
            seen.add(checked.prompt_id)
        except BadRow as problem:
            checked.problem = problem
        yield checked


def read_prompt(row: dict[str, Any], source: Source) -> str | Messages:
    """The prompt: text, or chat messages; raises `BadRow`."""
    prompt = _column(row, source.prompt_column)
    if isinstance(prompt, str) and prompt.strip():
        return prompt
    if isinstance(prompt, list) and prompt and all(_is_message(message) for message in prompt):
        _check_finite(prompt, source.prompt_column, "prompt")
        return prompt
    if prompt in (None, "", []):
        raise BadRow(f"no prompt in column {source.prompt_column!r}", "prompt")
    raise BadRow(f"column {source.prompt_column!r} holds neither text nor chat messages", "prompt")


def read_answer(row: dict[str, Any], source: Source) -> Any:
    """The reference answer as the data has it, or what follows the last mark; raises `BadRow`."""
    answer = _column(row, source.answer_column)
    if is_missing(answer):
        raise BadRow(f"no answer in column {source.answer_column!r}", "answer")
    if source.answer_after is not None:
        answer = _answer_after(source.answer_after, answer, source.answer_column)
    # A number of numpy's cannot be sent.
    answer = answer.item() if isinstance(answer, np.generic) else answer
    _check_finite(answer, source.answer_column, "answer")
    return answer


def check_can_be_sent(row: dict[str, Any]) -> None:
    """Raise `BadRow` for a row that a task cannot carry."""
    try:
        # As deep as in a task.
        check(msgpack.packb((row,)), MAX_ROW_BYTES, MAX_ROW_VALUES)
    except Unreadable as error:
        raise BadRow(f"too large or nested too deep to be sent ({error})") from None
    except (TypeError, ValueError, OverflowError, RecursionError):
        for name, value in row.items():
            if reason := _why_not_packed(name) or _why_not_packed(value):
                raise BadRow(f"column {str(name)[:100]!r} {reason}") from None
        raise BadRow("it cannot be sent as a message") from None


def _why_not_packed(value: Any) -> str:
    """Why msgpack does not take a value; empty if it does."""
    try:
        msgpack.packb(value)
    except OverflowError:
        return "holds an integer of more than 64 bits; write it as text"
    except UnicodeError:
        return "holds half a surrogate pair, which is no text"
    except TypeError as error:
        return f"holds what no message can carry ({error})"
    except (ValueError, RecursionError) as error:
        return f"is nested too deep, or too large ({error})"
    return ""


def _answer_after(mark: str, answer: Any, column: str) -> str:
    _, found, text = str(answer).rpartition(mark)
    text = text.strip()
    if not found or not text:
        raise BadRow(f"no answer behind {mark!r} in column {column!r}", "answer")
    return text.replace(",", "") if THOUSANDS.fullmatch(text) else text


def missing_columns(row: dict[str, Any], source: Source) -> str:
    """Which of the source's columns a row does not have, and which ones it has; empty where it has them."""
    columns = (source.prompt_column, source.answer_column, source.id_column)
    missing = [name for name in columns if name is not None and name.partition(".")[0] not in row and name not in row]
    if not missing:
        return ""
    shown = ", ".join(map(repr, missing))
    return f"there is no column {shown}; there are {', '.join(map(str, row)) or 'none'}"


def _row_id(row: dict[str, Any], prompt: str | Messages, source: Source) -> str:
    if source.id_column is not None:
        row_id = _column(row, source.id_column)
        if isinstance(row_id, bool) or not isinstance(row_id, str | int) or row_id == "":
            raise BadRow(f"no id in column {source.id_column!r}", "id")
        return str(row_id)
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, ensure_ascii=False)
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _check_finite(value: Any, column: str, problem: str) -> None:
    """Raise `BadRow` for NaN and infinity, which neither compare nor can be written as JSON."""
    if isinstance(value, str | int):
        return
    try:
        json_line(value)
    except (TypeError, RecursionError):
        return  # `check_can_be_sent` says why
    except ValueError:
        raise BadRow(f"column {column!r} holds a number that is not finite", problem) from None


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str) and bool(message.get("content"))


def _column(row: dict[str, Any], name: str) -> Any:
    """A column's value; `a.b` looks into a column of mappings."""
    if name in row or "." not in name:
        return row.get(name)
    value: Any = row
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value
