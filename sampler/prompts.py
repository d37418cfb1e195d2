"""The prompts of a run, with their answers and ids; unusable rows are set aside and named in the log."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np

from common.config import DataConfig
from common.errors import UserError
from sampler.rows import BadRow, Rows, open_rows

MAX_LOGGED = 10  # rows set aside that are logged one by one

Messages = list[dict[str, Any]]


@dataclass(slots=True)
class Prompt:
    """What a task needs: the prompt as text or chat messages, the answer, the row's other columns."""

    prompt: str | Messages
    answer: Any
    row: dict[str, Any]

    def shown(self) -> dict[str, Any]:
        """Prompt and answer, as files of episodes name them."""
        return {"input": self.prompt, "gts": self.answer}


class PromptSet:
    """Prompts by position; their texts stay in the file until asked for.

    Args:
        usable: row number of each prompt, [N].
        ids: of each prompt.
    """

    def __init__(self, rows: Rows, usable: np.ndarray, ids: list[str], config: DataConfig) -> None:
        self.ids = ids
        self._rows = rows
        self._usable = usable
        self._config = config

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> Prompt:
        row = self._rows[self._usable.item(i)]
        prompt, answer = _prompt(row, self._config), _answer(row, self._config)
        used = (self._config.prompt_column, self._config.answer_column)
        return Prompt(prompt, answer, {name: value for name, value in row.items() if name not in used})

    def texts(self) -> Iterator[tuple[str, str]]:
        """(prompt text, prompt id) of every prompt; of chat messages, the last one's text."""
        for i, prompt_id in enumerate(self.ids):
            prompt = _prompt(self._rows[self._usable.item(i)], self._config)
            yield (prompt if isinstance(prompt, str) else str(prompt[-1]["content"])), prompt_id


class RunData(NamedTuple):
    """Training and held-out prompts of a run."""

    train: PromptSet
    heldout: PromptSet | None


def load_data(config: DataConfig, log: Any) -> RunData:
    """Training and held-out prompts; raises `UserError` where one of the two cannot be used."""
    train = load_prompts(config.train, config.train_split, config, log)
    if config.heldout is None:
        return RunData(train, None)
    heldout = load_prompts(config.heldout, config.heldout_split, config, log)
    shared = len(set(heldout.ids).intersection(train.ids))
    if shared:
        log.warning("held-out prompts are also trained on", prompts=shared, of=len(heldout))
    return RunData(train, heldout)


def load_prompts(source: str, split: str, config: DataConfig, log: Any) -> PromptSet:
    """Read and check every row of a data set once.

    A row without prompt or answer, or with a prompt (or id) that came before, is set aside: counted, and
    named by file and line in the log.

    Raises:
        UserError: the data cannot be read, or no row is usable.
    """
    rows = open_rows(source, split)
    ids: list[str] = []
    usable: list[int] = []
    seen: set[str] = set()
    reasons: Counter[str] = Counter()
    first = ""
    for i, row in enumerate(rows):
        try:
            prompt_id = _checked_id(row, config)
            if prompt_id in seen:
                raise BadRow("the same prompt as an earlier row" if config.id_column is None else "an id used before")
        except BadRow as problem:
            reason = str(problem)
            reasons[reason] += 1
            first = first or f"{rows.where(i)}: {reason}"
            if reasons.total() <= MAX_LOGGED:
                log.warning("row set aside", row=rows.where(i), reason=reason)
            continue
        seen.add(prompt_id)
        ids.append(prompt_id)
        usable.append(i)
    if not ids:
        problem_text = f"all {len(rows)} rows are unusable ({first})" if len(rows) else "it is empty"
        raise UserError(f"no prompts in {source}: {problem_text}")
    if reasons:
        log.warning("rows set aside", data=source, count=reasons.total(), of=len(rows), reasons=dict(reasons))
    log.info("prompts read", data=source, prompts=len(ids))
    return PromptSet(rows, np.array(usable, np.int64), ids, config)


def _checked_id(row: dict[str, Any] | BadRow, config: DataConfig) -> str:
    """The row's prompt id; raises `BadRow` where the row cannot be used."""
    if isinstance(row, BadRow):
        raise row
    prompt = _prompt(row, config)
    _answer(row, config)
    if config.id_column is not None:
        row_id = _column(row, config.id_column)
        if isinstance(row_id, bool) or not isinstance(row_id, str | int) or row_id == "":
            raise BadRow(f"no id in column {config.id_column!r}")
        return str(row_id)
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, ensure_ascii=False)
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _prompt(row: dict[str, Any], config: DataConfig) -> str | Messages:
    prompt = _column(row, config.prompt_column)
    if isinstance(prompt, str) and prompt.strip():
        return prompt
    if isinstance(prompt, list) and prompt and all(_is_message(message) for message in prompt):
        return prompt
    if prompt in (None, "", []):
        raise BadRow(f"no prompt in column {config.prompt_column!r}")
    raise BadRow(f"column {config.prompt_column!r} holds neither text nor chat messages")


def _answer(row: dict[str, Any], config: DataConfig) -> Any:
    answer = _column(row, config.answer_column)
    if answer is None or answer == "":
        raise BadRow(f"no answer in column {config.answer_column!r}")
    return answer


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
