"""The prompts of a run, with their answers and ids; unusable rows are skipped and named in the log."""

from __future__ import annotations

import contextlib
import json
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate, chain
from typing import Any, NamedTuple

import msgpack
import numpy as np

from common.answers import answer_kind, are_mixed, is_missing
from common.config import Config, DataConfig, Source
from common.errors import UserError
from common.messages import Task
from common.payload import json_line
from common.unpack import MAX_BYTES, MAX_VALUES, Unreadable, check
from sampler.prompts.chat import Messages, NotAMessage, plain_messages
from sampler.prompts.hints import Hints
from sampler.prompts.row import BadRow, CheckedRow, Rows
from sampler.prompts.rows import open_source

# A task carries the answer beside its row, so a part of the row may be in it twice.
MAX_ROW_BYTES, MAX_ROW_VALUES = MAX_BYTES // 2 - (1 << 16), MAX_VALUES // 2 - 256

# A number with commas between thousands, as GSM8K writes it.
THOUSANDS = re.compile(r"-?\d{1,3}(,\d{3})+(\.\d+)?")
COLUMNS = ("prompt_column", "answer_column", "id_column")
MAX_LOGGED = 10  # skipped rows that are logged one by one


@dataclass(slots=True)
class Prompt:
    """A prompt as text or chat messages, its answer, and the row's other columns."""

    prompt: str | Messages
    answer: Any
    row: dict[str, Any]

    def shown(self) -> dict[str, Any]:
        """Prompt and answer, under their names in files of episodes."""
        return {"input": self.prompt, "gts": self.answer}


class SourcePrompts:
    """The prompts of one source by position; their texts are read from the file on demand.

    Args:
        usable: row number of each prompt, [N].
        ids: of each prompt.
    """

    def __init__(self, source: Source, rows: Rows, usable: np.ndarray, ids: list[str]) -> None:
        self.source, self.ids = source, ids
        self._rows, self._usable = rows, usable

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> Prompt:
        source = self.source
        try:
            row = self._rows[self._usable.item(i)]
            prompt, answer = read_prompt(row, source), read_answer(row, source)
            check_can_be_sent(row)
            if _row_id(row, prompt, source) != self.ids[i]:
                raise BadRow("another row is in its place")
        except BadRow as problem:
            raise self._changed(i, problem) from None
        used = (source.prompt_column, source.answer_column)
        return Prompt(prompt, answer, {name: value for name, value in row.items() if name not in used})

    def where(self, i: int) -> str:
        return self._rows.where(self._usable.item(i))

    def prompts(self) -> Iterator[str | Messages]:
        for i, number in enumerate(self._usable.tolist()):
            try:
                yield read_prompt(self._rows[number], self.source)
            except BadRow as problem:
                raise self._changed(i, problem) from None

    def _changed(self, i: int, problem: BadRow) -> UserError:
        return UserError(
            f"{self.where(i)} can no longer be used ({problem}): the file was changed while it was in use; start "
            "again, and the run continues without that row"
        )

    def first(self, n: int) -> SourcePrompts:
        """The first n prompts, or all if there are fewer."""
        return SourcePrompts(self.source, self._rows, self._usable[:n], self.ids[:n])


class PromptSet:
    """The prompts of all sources by position, one source after the other.

    Attributes:
        ids: of each prompt, prefixed with `NAME/` if there are several sources.
        parts: the prompts of each source.
        starts: where each source's prompts begin, and the end of the last, [S + 1].
    """

    def __init__(self, parts: Sequence[SourcePrompts]) -> None:
        self.parts = list(parts)
        self.starts = [0, *accumulate(len(part) for part in self.parts)]
        if len(self.parts) == 1:
            self.ids = self.parts[0].ids
        else:
            self.ids = [f"{part.source.name}/{prompt_id}" for part in self.parts for prompt_id in part.ids]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> Prompt:
        part = self._part(i)
        return self.parts[part][i - self.starts[part]]

    def source(self, i: int) -> str:
        """Name of prompt i's source."""
        return self.parts[self._part(i)].source.name

    def where(self, i: int) -> str:
        part = self._part(i)
        return self.parts[part].where(i - self.starts[part])

    def prompts(self) -> Iterator[str | Messages]:
        """Every prompt without its answer and row; faster than asking by position."""
        return chain.from_iterable(part.prompts() for part in self.parts)

    def task(self, i: int, task_id: str, **fields: Any) -> Task:
        """A task for prompt i; `fields` are the remaining fields of `Task`."""
        prompt, prompt_id, source = self[i], self.ids[i], self.source(i)
        return Task(
            task_id=task_id, prompt_id=prompt_id, prompt=prompt.prompt, answer=prompt.answer, row=prompt.row,
            source=source, **fields,
        )  # fmt: skip

    def first(self, n: int) -> PromptSet:
        """The first n prompts of each source."""
        return PromptSet([part.first(n) for part in self.parts])

    def _part(self, i: int) -> int:
        if not 0 <= i < len(self):
            raise IndexError(f"prompt {i} of {len(self)}")
        return bisect_right(self.starts, i) - 1


class RunData(NamedTuple):
    train: PromptSet
    heldout: PromptSet | None


def load_data(config: DataConfig, log: Any) -> RunData:
    """Training and held-out prompts; raises `UserError` if either cannot be used."""
    train = load_prompts(config.sources("train"), log)
    if config.heldout is None:
        return RunData(train, None)
    heldout = load_prompts(config.sources("heldout"), log)
    shared = trained_on(train, heldout)
    if shared:
        log.warning("held-out prompts are also trained on", prompts=shared, of=len(heldout))
    return RunData(train, heldout)


def trained_on(train: PromptSet, heldout: PromptSet) -> int:
    """How many held-out prompts are also in the training data."""
    # Ids of different columns cannot be compared. The table holds the held-out prompts, which are far fewer.
    places: defaultdict[tuple[str | None, str], list[tuple[int, int]]] = defaultdict(list)
    for number, part in enumerate(heldout.parts):
        for place, prompt_id in enumerate(part.ids):
            places[part.source.id_column, prompt_id].append((number, place))
    shared: set[tuple[int, int]] = set()
    for part in train.parts:
        column = part.source.id_column
        for i, prompt_id in enumerate(part.ids):
            for number, place in places.get((column, prompt_id), ()):
                # Two files may each number their rows: an id from a column does not tell that the prompts are the same.
                if column is None or heldout.parts[number][place].prompt == part[i].prompt:
                    shared.add((number, place))
    return len(shared)


def too_few(config: Config, train: PromptSet) -> str | None:
    """A warning if a batch needs more distinct prompts than there are; None otherwise."""
    groups = config.sampler.batch_size // config.algorithm.responses
    if groups <= len(train):
        return None
    return (
        f"sampler.batch_size = {config.sampler.batch_size} needs {groups} prompts, but data.train has {len(train)}: "
        "each is in a batch several times; lower it, or give more data"
    )


def load_prompts(sources: Sequence[Source], log: Any) -> PromptSet:
    """Read and check every row of some data sets once.

    A row without prompt or answer, or with a prompt (or id) that came before in its source, is skipped: counted, and
    named by file and line in the log.

    Raises:
        UserError: a source cannot be read, or has no usable row.
    """
    return PromptSet([_load(source, log) for source in sources])


def _load(source: Source, log: Any) -> SourcePrompts:
    rows = open_source(source)
    ids: list[str] = []
    usable: list[int] = []
    reasons: Counter[str] = Counter()
    answers: dict[str, list[int]] = {}  # by kind of answer: their number, and the row of the first
    first = ""
    hints = Hints(source, rows)
    for row in check_rows(rows, source):
        hints.add(row)
        if row.problem is not None:
            reason = str(row.problem)
            reasons[reason] += 1
            if not first:
                columns = missing_columns(row.row, source) if row.row is not None else ""
                first = f"{rows.where(row.number)}: {reason}" + (f"; {columns}" if columns else "")
            if reasons.total() <= MAX_LOGGED:
                log.warning("row skipped", row=rows.where(row.number), reason=reason)
            continue
        ids.append(row.prompt_id)
        usable.append(row.number)
        if row.answer is not None:
            answers.setdefault(answer_kind(row.answer), [0, row.number])[0] += 1
    if not ids:
        problem_text = f"all {len(rows)} rows are unusable ({first})" if len(rows) else "it is empty"
        raise UserError(f"{source.key}: no prompts in {source.shown()}: {problem_text}")
    if reasons:
        log.warning("rows skipped", data=source.shown(), count=reasons.total(), of=len(rows), reasons=dict(reasons))
    if are_mixed(answers):
        examples = {kind: f"{count}, first in {rows.where(row)}" for kind, (count, row) in answers.items()}
        log.warning("answers of different types", data=source.shown(), types=examples)
    for line in hints.lines():
        log.warning(f"{source.key}: {line}")
    log.info("prompts read", data=source.shown(), source=source.name, prompts=len(ids))
    return SourcePrompts(source, rows, np.array(usable, np.int64), ids)


def check_rows(rows: Rows, source: Source) -> Iterator[CheckedRow]:
    """Every row in order; a prompt (or an id) that came before is a problem of the later row."""
    seen: dict[str, int] = {}  # ids, and the rows that have them first
    for number, row in enumerate(rows):
        checked = CheckedRow(number)
        try:
            if isinstance(row, BadRow):
                raise row
            checked.row = row
            checked.prompt, checked.answer = read_prompt(row, source), read_answer(row, source)
            check_can_be_sent(row)
            checked.prompt_id = _row_id(row, checked.prompt, source)
            checked.earlier = seen.get(checked.prompt_id)
            if checked.earlier is not None:
                same = "the same prompt as an earlier row" if source.id_column is None else "an id used before"
                raise BadRow(same, "duplicate")
            seen[checked.prompt_id] = number
        except BadRow as problem:
            checked.problem = problem
        yield checked


def read_prompt(row: dict[str, Any], source: Source) -> str | Messages:
    """The prompt: text, or chat messages; raises `BadRow`."""
    prompt = column_value(row, source.prompt_column)
    if isinstance(prompt, str) and prompt.strip():
        return prompt
    if prompt is None or prompt == [] or isinstance(prompt, str):
        raise BadRow(f"no prompt in column {source.prompt_column!r}", "prompt")
    keys = f" ({', '.join(map(str, prompt))})" if isinstance(prompt, dict) else ""
    reason = f", but a value of type {type(prompt).__name__}{keys}"
    if isinstance(prompt, list):
        try:
            with contextlib.suppress(TypeError):  # bytes, which may be in a part that is left out
                _check_finite(prompt, source.prompt_column, "prompt")
                return plain_messages(prompt)
            messages = plain_messages(prompt)
            _check_finite(messages, source.prompt_column, "prompt")
            return messages
        except NotAMessage as error:
            reason = f": {error}"
        except TypeError as error:
            reason = f", but messages with values that are not text ({error})"
        except RecursionError:
            reason = ", and is nested too deep"
    raise BadRow(f"column {source.prompt_column!r} holds neither text nor chat messages{reason}", "prompt")


def read_answer(row: dict[str, Any], source: Source) -> Any:
    """The reference answer as it is in the data, or the text after the last mark; raises `BadRow`.

    None if the source has no answers.
    """
    if source.answer_column is None:
        return None
    answer = column_value(row, source.answer_column)
    if is_missing(answer):
        raise BadRow(f"no answer in column {source.answer_column!r}", "answer")
    if source.answer_after is not None:
        answer = _answer_after(source.answer_after, answer, source.answer_column)
    # numpy's numbers cannot be sent.
    answer = answer.item() if isinstance(answer, np.generic) else answer
    with contextlib.suppress(TypeError, RecursionError):  # `check_can_be_sent` says why
        _check_finite(answer, source.answer_column, "answer")
    return answer


def check_can_be_sent(row: dict[str, Any]) -> None:
    """Raise `BadRow` for a row that a task cannot carry."""
    try:
        # In a tuple, so that it is nested as deep as in a task.
        check(msgpack.packb((row,)), MAX_ROW_BYTES, MAX_ROW_VALUES)
    except Unreadable as error:
        raise BadRow(f"too large or nested too deep to be sent ({error})") from None
    except (TypeError, ValueError, OverflowError, RecursionError):
        for name, value in row.items():
            if reason := _why_not_packed(name) or _why_not_packed(value):
                raise BadRow(f"column {str(name)[:100]!r} {reason}") from None
        raise BadRow("it cannot be sent as a message") from None


def _why_not_packed(value: Any) -> str:
    """The reason why msgpack rejects a value; empty if it does not."""
    try:
        msgpack.packb(value)
    except OverflowError:
        return "holds an integer of more than 64 bits; write it as text"
    except UnicodeError:
        return "holds half a surrogate pair, which is not text"
    except TypeError as error:
        return f"holds a value that no message can carry ({error})"
    except (ValueError, RecursionError) as error:
        return f"is nested too deep, or too large ({error})"
    return ""


def _answer_after(mark: str, answer: Any, column: str) -> str:
    _, separator, text = str(answer).rpartition(mark)
    text = text.strip()
    if not separator or not text:
        raise BadRow(f"no answer after {mark!r} in column {column!r}", "answer")
    return text.replace(",", "") if THOUSANDS.fullmatch(text) else text


def missing_columns(row: dict[str, Any], source: Source) -> str:
    """Names the source's columns that a row lacks, and those it has; empty if it lacks none."""
    names = {key: name for key in COLUMNS if (name := getattr(source, key)) is not None}
    missing = {key: name for key, name in names.items() if name.partition(".")[0] not in row and name not in row}
    if not missing:
        return ""
    settings = " and ".join(f"data.{key}" for key in missing)
    without = ", or to null if the reward needs no answer" if "answer_column" in missing else ""
    columns = ", ".join(_columns(row)) or "none"
    return f"there is no column {', '.join(map(repr, missing.values()))}; there are {columns}; set {settings}{without}"


def _columns(row: dict[str, Any]) -> Iterator[str]:
    """Names of the columns, and `a.b` for each key in a column of mappings."""
    for name, value in row.items():
        yield from (f"{name}.{key}" for key in value) if isinstance(value, dict) and value else (str(name),)


def _row_id(row: dict[str, Any], prompt: str | Messages, source: Source) -> str:
    if source.id_column is not None:
        row_id = column_value(row, source.id_column)
        if isinstance(row_id, bool) or not isinstance(row_id, str | int) or row_id == "":
            raise BadRow(f"no id in column {source.id_column!r}", "id")
        return str(row_id)
    return prompt_hash(prompt)


def prompt_hash(prompt: str | Messages) -> str:
    """A hash of a prompt, the same in every process: 16 hexadecimal digits."""
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, ensure_ascii=False)
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _check_finite(value: Any, column: str, problem: str) -> None:
    """Raise `BadRow` for NaN and infinity, which cannot be compared or written as JSON.

    Raises:
        TypeError, RecursionError: JSON cannot have the value for another reason.
    """
    if isinstance(value, str | int):
        return
    try:
        json_line(value)
    except ValueError:
        raise BadRow(f"column {column!r} holds a number that is not finite", problem) from None


def column_value(row: dict[str, Any], name: str) -> Any:
    """A column's value, None if there is none; `a.b` is key b in column a, which holds mappings."""
    if name in row or "." not in name:
        return row.get(name)
    value: Any = row
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value
