"""The prompts of a run, with their answers and ids; unusable rows are set aside and named in the log."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from common.answers import answer_kind, are_mixed
from common.config import DataConfig, Source
from common.errors import UserError
from sampler.bad_row import BadRow
from sampler.checked_rows import Messages, check_can_be_sent, check_rows, missing_columns, read_answer, read_prompt
from sampler.rows import Rows, open_rows
from sampler.score_rows import prompt_key

MAX_LOGGED = 10  # rows set aside that are logged one by one


@dataclass(slots=True)
class Prompt:
    """What a task needs: the prompt as text or chat messages, the answer, the row's other columns."""

    prompt: str | Messages
    answer: Any
    row: dict[str, Any]

    def shown(self) -> dict[str, Any]:
        """Prompt and answer, as files of episodes name them."""
        return {"input": self.prompt, "gts": self.answer}


class SourcePrompts:
    """The prompts of one source by position; their texts stay in the file until asked for.

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
        except BadRow as problem:
            raise UserError(
                f"{self.where(i)} can no longer be used ({problem}): the file was changed while it was in use; start "
                "again, and the run goes on without that row"
            ) from None
        used = (source.prompt_column, source.answer_column)
        return Prompt(prompt, answer, {name: value for name, value in row.items() if name not in used})

    def where(self, i: int) -> str:
        """File and line of prompt i, for people."""
        return self._rows.where(self._usable.item(i))

    def texts(self) -> Iterator[str]:
        """The text of every prompt; of chat messages, the last one's."""
        for i in self._usable.tolist():
            prompt = read_prompt(self._rows[i], self.source)
            yield prompt if isinstance(prompt, str) else str(prompt[-1]["content"])

    def first(self, n: int) -> SourcePrompts:
        """The first n prompts, or all if there are fewer."""
        return SourcePrompts(self.source, self._rows, self._usable[:n], self.ids[:n])

    def score_keys(self) -> Iterator[str]:
        """The key of every prompt in files of offline scores."""
        for i in self._usable.tolist():
            yield prompt_key(read_prompt(self._rows[i], self.source))


class PromptSet:
    """The prompts of all sources by position, one source after the other.

    Attributes:
        ids: of each prompt; with several sources, `NAME/` is in front.
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
        """Name of the source that prompt i is of."""
        return self.parts[self._part(i)].source.name

    def where(self, i: int) -> str:
        """File and line of prompt i, for people."""
        part = self._part(i)
        return self.parts[part].where(i - self.starts[part])

    def texts(self) -> Iterator[tuple[str, str]]:
        """(prompt text, prompt id) of every prompt; of chat messages, the last one's text."""
        return zip((text for part in self.parts for text in part.texts()), self.ids, strict=True)

    def first(self, n: int) -> PromptSet:
        """The first n prompts of each source."""
        return PromptSet([part.first(n) for part in self.parts])

    def score_keys(self) -> Iterator[tuple[str, str]]:
        """(key in files of offline scores, prompt id) of every prompt."""
        return zip((key for part in self.parts for key in part.score_keys()), self.ids, strict=True)

    def _part(self, i: int) -> int:
        if not 0 <= i < len(self):
            raise IndexError(f"prompt {i} of {len(self)}")
        return bisect_right(self.starts, i) - 1


class RunData(NamedTuple):
    """Training and held-out prompts of a run."""

    train: PromptSet
    heldout: PromptSet | None


def load_data(config: DataConfig, log: Any) -> RunData:
    """Training and held-out prompts; raises `UserError` where one of the two cannot be used."""
    train = load_prompts(config.sources("train"), log)
    if config.heldout is None:
        return RunData(train, None)
    heldout = load_prompts(config.sources("heldout"), log)
    # Ids of a column say nothing about those of another one.
    trained = {(part.source.id_column, prompt_id) for part in train.parts for prompt_id in part.ids}
    shared = sum((part.source.id_column, prompt_id) in trained for part in heldout.parts for prompt_id in part.ids)
    if shared:
        log.warning("held-out prompts are also trained on", prompts=shared, of=len(heldout))
    return RunData(train, heldout)


def load_prompts(sources: Sequence[Source], log: Any) -> PromptSet:
    """Read and check every row of some data sets once.

    A row without prompt or answer, or with a prompt (or id) that came before in its source, is set aside: counted, and
    named by file and line in the log.

    Raises:
        UserError: a source cannot be read, or has no usable row.
    """
    return PromptSet([_load(source, log) for source in sources])


def _load(source: Source, log: Any) -> SourcePrompts:
    rows = open_rows(source.path, source.split, source.options, source.config)
    ids: list[str] = []
    usable: list[int] = []
    reasons: Counter[str] = Counter()
    answers: dict[str, list[int]] = {}  # kinds of answers: how many there are, and the row of the first
    first = ""
    for row in check_rows(rows, source):
        if row.problem is not None:
            reason = str(row.problem)
            reasons[reason] += 1
            if not first:
                columns = missing_columns(row.row, source) if row.row is not None else ""
                first = f"{rows.where(row.number)}: {reason}" + (f"; {columns}" if columns else "")
            if reasons.total() <= MAX_LOGGED:
                log.warning("row set aside", row=rows.where(row.number), reason=reason)
            continue
        ids.append(row.prompt_id)
        usable.append(row.number)
        answers.setdefault(answer_kind(row.answer), [0, row.number])[0] += 1
    if not ids:
        problem_text = f"all {len(rows)} rows are unusable ({first})" if len(rows) else "it is empty"
        raise UserError(f"{source.key}: no prompts in {source.shown()}: {problem_text}")
    if reasons:
        log.warning("rows set aside", data=source.path, count=reasons.total(), of=len(rows), reasons=dict(reasons))
    if are_mixed(answers):
        examples = {kind: f"{count}, first in {rows.where(row)}" for kind, (count, row) in answers.items()}
        log.warning("answers of different types", data=source.path, types=examples)
    log.info("prompts read", data=source.path, source=source.name, prompts=len(ids))
    return SourcePrompts(source, rows, np.array(usable, np.int64), ids)
