"""Runs without training steps, for `spo values estimate` and `spo eval`: each answer becomes a line of a file."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from common.config import Config
from common.config.data import Side, Source
from common.errors import UserError
from common.messages import InvalidMessage, SampleHeader, Task
from common.payload import open_record
from sampler.evaluation import prompt_groups
from sampler.files.answer_file import AnswerFile, Request
from sampler.prompts.prompt_set import PromptSet, load_prompts
from sampler.records import DispatchedTask
from sampler.seeds import task_seed
from sampler.state import SamplerState

# Fields of an episode's record that `spo data demonstrations` reads: messages and, of evaluations, tokens.
EPISODE = ("messages", "token_ids", "model_spans", "row_lengths")


class Answers:
    """Stands in for `Evaluations` in a run without training steps: every prompt is answered `responses` times.

    The file says which tasks have been answered, Redis which are in flight. Lines are written before the commit that
    counts their headers: after a kill in between, the next sampler reads the same headers again and finds their
    answers in the file.

    Raises:
        UserError: `eval.by_column` does not fit the data, or the file cannot be used.
    """

    def __init__(self, config: Config, prompts: PromptSet, request: Request, state: SamplerState, log: Any) -> None:
        self.file = AnswerFile(request.output, prompts.ids, log)
        self.reasons: Counter[str] = Counter()  # why tasks were skipped
        self._run, self._prompts, self._request, self._state, self._log = config.run, prompts, request, state, log
        self._groups = prompt_groups(prompts, config.eval.by_column, log) if request.kind == "eval" else None
        # As many as may be outstanding in training.
        self._most_in_flight = (config.sampler.max_staleness + 1) * config.sampler.batch_size
        self._round: dict[str, dict[str, Any]] = {}  # lines to write
        self._unasked: Iterator[str] = iter(())
        self._next: str | None = None
        self._has_changed = True  # since the counts were last published

    def begin(self, version: int, resumed: bool = False) -> None:
        """Find the tasks that are neither answered nor in flight."""
        in_flight = frozenset(self._state.admission.in_flight)
        task_ids = self._request.task_ids(self._prompts.ids)
        self._unasked = (task_id for task_id in task_ids if task_id not in self.file and task_id not in in_flight)
        self._next = next(self._unasked, None)

    def withdraw(self) -> None:
        """Nothing to do: answers in the file stay, and later ones to the same tasks are ignored."""

    def all_sent(self) -> bool:
        return self._next is None

    def start_due(self) -> None:
        while self._next is not None and len(self._state.admission.in_flight) < self._most_in_flight:
            task = self._task(self._next)
            self._state.dispatch(task, DispatchedTask(task.prompt_id, True, 0, 0.0))
            self._next = next(self._unasked, None)

    def send_again(self, task_id: str) -> None:
        """Send again a task that Redis has lost."""
        if self._index(task_id) is None:
            self._state.abandon_task(task_id)
        else:
            self._state.send_again(self._task(task_id))

    def add(self, due: int, header: SampleHeader) -> None:
        """Count an answer; one to an earlier request, whose sampler was killed, is ignored."""
        i = self._index(header.task_id)
        if i is None or header.task_id in self.file:
            self._state.count("ignored")
            return
        self._state.count("evaluated")
        self._has_changed = True
        if header.status == "set_aside":
            self._log.warning("task skipped", task=header.task_id, reason=header.reason)
            self.reasons[header.reason] += 1
        else:
            self._round[header.task_id] = self._row(i, header)

    def write(self) -> None:
        """Write the round's answers, and publish how many there are; raises `UserError` if the disk fails."""
        self.file.append(self._round)
        self._round.clear()
        if self._has_changed:
            self._state.save_answers(len(self.file.task_ids), self.reasons)
            self._has_changed = False

    def _row(self, i: int, header: SampleHeader) -> dict[str, Any]:
        """An answer as a row of the file. The prompt is read from the data: a long record may be truncated."""
        prompt = self._prompts[i]
        try:
            record = json.loads(open_record(header.record or b""))
        except (InvalidMessage, ValueError, RecursionError):
            record = {}
        output = record.get("output", "")
        return {
            "prompt_id": self._prompts.ids[i],
            "input": prompt.prompt,
            "output": output if isinstance(output, str) else "",
            "gts": prompt.answer,
            "score": header.reward,
            "step": header.newest_version,
            "source": self._prompts.source(i),
            "answer": header.answer,
            **({} if self._groups is None else {"groups": self._groups[i]}),
            **{name: record[name] for name in EPISODE if name in record and self._request.kind == "eval"},
        }

    def _task(self, task_id: str) -> Task:
        i = self._index(task_id)
        assert i is not None, "only tasks of this request are sent"
        kind = self._request.kind
        return self._prompts.task(i, task_id, kind=kind, seed=task_seed(self._run, task_id), keep=kind == "eval")

    def _index(self, task_id: str) -> int | None:
        prompt_id = self._request.prompt_id(task_id)
        return None if prompt_id is None else self._state.tracker.index.get(prompt_id)


def load_questions(config: Config, request: Request, log: Any) -> PromptSet:
    """The prompts of a request: all of `data.train`, or the first `eval.limit` of each source of `data.heldout`.

    Raises:
        UserError: there is no such source, or its prompts cannot be used.
    """
    side: Side = "heldout" if request.kind == "eval" else "train"
    sources = config.data.sources(side)
    if request.data is not None:
        sources = [_part_of(sources, side, request.data)]
    prompts = load_prompts(sources, log)
    limit = config.eval.limit if request.kind == "eval" else None
    return prompts if limit is None else prompts.first(limit)


def _part_of(sources: Sequence[Source], side: Side, data: str) -> Source:
    name, equals, path = data.partition("=")
    chosen = [source for source in sources if not equals or source.name == name]
    if len(chosen) != 1:
        names = ", ".join(source.name for source in sources)
        raise UserError(f"--data {data}: data.{side} has {names}; name the one that it is a part of, NAME=FILE")
    # The part has the same columns as its source, so the source's settings apply to it, except those for finding its
    # rows.
    return replace(chosen[0], key="--data", path=path if equals else data, options={}, config=None)
