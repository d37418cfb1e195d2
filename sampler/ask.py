"""Answers without training: every prompt is answered several times with fixed weights, each answer a line of a file.

This is the sampler's loop of a run without a learner (`run.steps = 0`). It uses the streams as the sampler does: tasks
and what is in flight are written by one commit, a generator that dies is replaced by others, and what cannot be
answered is set aside with its reason. The file says what has been answered, Redis what is on its way.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgpack

from common.config import Config
from common.messages import InvalidMessage, Kind, SampleHeader, Task
from common.payload import open_record
from common.streams.ledger import Commit, SamplerLedger
from sampler.answer_file import AnswerFile
from sampler.evaluation_groups import prompt_groups
from sampler.failure_limit import FailureLimit
from sampler.lost_tasks import LostTasks
from sampler.prompts import PromptSet
from sampler.task_seed import task_seed

MAX_HEADERS = 512  # of one round
BLOCK_MS = 200


def questions(prompts: PromptSet, kind: Kind, responses: int) -> Iterator[tuple[str, int]]:
    """Task id and index of the prompt of everything that is to be answered, prompt by prompt."""
    for i, prompt_id in enumerate(prompts.ids):
        for n in range(responses):
            yield f"{kind}{n}-{prompt_id}", i


class Asker:
    """Has every prompt answered `responses` times.

    Args:
        kind: `values`, sampled like training responses, or `eval`, sampled like evaluations and reported by group.
        file: gets the answers; what it holds already is not asked.

    Raises:
        UserError: `eval.by_column` does not fit the data.
    """

    def __init__(
        self, config: Config, prompts: PromptSet, kind: Kind, responses: int, file: AnswerFile, ledger: SamplerLedger,
        log: Any,
    ) -> None:  # fmt: skip
        self.run_config, self.prompts, self.kind, self.responses = config.run, prompts, kind, responses
        self.file, self.ledger, self.log = file, ledger, log
        self.index = {prompt_id: i for i, prompt_id in enumerate(prompts.ids)}
        column = config.eval.by_column
        self.groups = prompt_groups(prompts, range(len(prompts.ids)), column, log) if kind == "eval" else None
        # As many as may be outstanding in training.
        self.most_in_flight = (config.sampler.max_staleness + 1) * config.sampler.batch_size
        self.failures = FailureLimit(config.sampler)
        self.lost = LostTasks(ledger)
        self.in_flight: set[str] = set()
        self.reasons: Counter[str] = Counter()  # why tasks were set aside
        self.stop = threading.Event()
        self._unasked: Iterator[tuple[str, int]] = iter(())
        self._next: tuple[str, int] | None = None
        self._last_commit = 0.0

    def run(self) -> None:
        """Work until all is answered or set aside, or until `stop` is set.

        Raises:
            UserError: the file cannot be written, or nothing is answered any more.
            LeaseLost: another process asks in this run.
            OutOfStep: Redis lost what this process had written; start again.
        """
        self.begin()
        while not self.stop.is_set() and not self.over():
            self.round()
        if self.over():
            self.log.info("all is answered", answers=len(self.file.task_ids), set_aside=self.reasons.total())

    def begin(self) -> None:
        """Become the only one that asks, and find out what is on its way and what is left to ask."""
        saved = self.ledger.acquire()
        # Those of another file, whose process was killed, are not awaited.
        self.in_flight = {task_id for task_id in saved.outstanding if self._prompt_of(task_id) is not None}
        in_flight = frozenset(self.in_flight)
        self._unasked = (
            (task_id, i)
            for task_id, i in questions(self.prompts, self.kind, self.responses)
            if task_id not in self.file and task_id not in in_flight
        )
        self._next = next(self._unasked, None)

    def over(self) -> bool:
        """Whether nothing is left to ask or on its way."""
        return self._next is None and not self.in_flight

    def round(self) -> None:
        """One round: answers into the file, then the commit that counts them and asks for more.

        Killed between the two, the next process reads the same headers again, and finds them in the file.
        """
        commit = Commit()
        rows: dict[str, dict[str, Any]] = {}
        for entry_id, header in self.ledger.read(MAX_HEADERS, BLOCK_MS if self.in_flight else 0):
            commit.counted.append(entry_id)
            commit.outstanding_remove.append(header.task_id)
            self._count(header, rows)
        self.file.append(rows)
        is_paused = len(self.in_flight) < self.most_in_flight and self.ledger.broker.memory_is_short()
        while self._next is not None and len(self.in_flight) < self.most_in_flight and not is_paused:
            self._dispatch(*self._next, commit)
            self._next = next(self._unasked, None)
        for task_id in self.lost.ids:
            if task_id not in self.in_flight:
                continue
            i = self._prompt_of(task_id)
            assert i is not None, "only tasks of this file are in flight"
            self.log.warning("a task had vanished from redis and is sent again", task=task_id)
            self._dispatch(task_id, i, commit)
            commit.counters = {"dispatched": commit.counters.get("dispatched", 0) - 1}
        if commit or time.monotonic() - self._last_commit > self.ledger.broker.dead_after / 4:
            commit.scalars = {"answered": len(self.file.task_ids), "reasons": msgpack.packb(dict(self.reasons))}
            self.ledger.commit(commit)
            self._last_commit = time.monotonic()
        self.lost.search(self.in_flight)
        self.failures.check()

    def _count(self, header: SampleHeader, rows: dict[str, dict[str, Any]]) -> None:
        self.in_flight.discard(header.task_id)
        i = self._prompt_of(header.task_id)
        if i is None or header.task_id in self.file:
            return
        self.failures.add(header)
        if header.status == "set_aside":
            self.log.warning("task set aside", task=header.task_id, reason=header.reason)
            self.reasons[header.reason] += 1
        else:
            rows[header.task_id] = self._row(i, header)

    def _row(self, i: int, header: SampleHeader) -> dict[str, Any]:
        """An answer as its line has it. The prompt is the data's own: a long record may have lost a part of it."""
        prompt = self.prompts[i]
        try:
            record = json.loads(open_record(header.record or b""))
        except (InvalidMessage, ValueError, RecursionError):
            record = {}
        output = record.get("output", "")
        return {
            "prompt_id": self.prompts.ids[i],
            "input": prompt.prompt,
            "output": output if isinstance(output, str) else "",
            "gts": prompt.answer,
            "score": header.reward,
            "step": header.newest_version,
            "source": self.prompts.source(i),
            "answer": header.answer,
            **({} if self.groups is None else {"groups": self.groups[i]}),
        }

    def _dispatch(self, task_id: str, i: int, commit: Commit) -> None:
        prompt = self.prompts[i]
        task = Task(
            task_id=task_id,
            prompt_id=self.prompts.ids[i],
            kind=self.kind,
            source=self.prompts.source(i),
            prompt=prompt.prompt,
            answer=prompt.answer,
            row=prompt.row,
            seed=task_seed(self.run_config, task_id),
        )
        self.in_flight.add(task_id)
        commit.dispatch.append((task, b""))

    def _prompt_of(self, task_id: str) -> int | None:
        """Index of the prompt that a task of this file asks; None for any other task."""
        name, _, prompt_id = task_id.partition("-")
        number = name.removeprefix(self.kind)
        if name == number or not number.isdecimal() or int(number) >= self.responses:
            return None
        return self.index.get(prompt_id)
