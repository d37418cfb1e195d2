"""Held-out evaluation: one version of the weights answers all of its tasks."""

from __future__ import annotations

import time
from difflib import get_close_matches
from typing import Any

from common.config import Config
from common.errors import UserError
from common.messages import SampleHeader, Task
from common.streams.ledger import SamplerLedger
from sampler.evaluation_metrics import Response, summarize_groups
from sampler.files.episode_files import EpisodeFiles, episode_line
from sampler.prompts.prompt_set import PromptSet, column_value
from sampler.records import DispatchedTask, EvaluationCounts
from sampler.seeds import task_seed
from sampler.state import BEFORE_FIRST_STEP, SamplerState

SLICE = 8192  # tasks sent by one commit
SLICES_IN_FLIGHT = 4
MAX_VALUES = 32  # of `eval.by_column`: each value has its own figures


class Evaluations:
    """Evaluates versions: counts the answers in the state, and writes them to `validation_data`.

    One evaluation is open at a time. The first generator with new enough weights decides which version answers it
    (`lease.lua`), and all generators with this version keep it until the evaluation is complete. If the last of them
    is gone before that, the evaluation starts again under another name, with a version that is then available.

    Raises:
        UserError: `eval.by_column` does not fit the data.
    """

    def __init__(
        self, config: Config, prompts: PromptSet | None, state: SamplerState, ledger: SamplerLedger, log: Any
    ) -> None:
        self._config, self._run = config.eval, config.run
        self._right_from = config.right_from
        self._files = EpisodeFiles(config.run.folder / "validation_data", config.run.keep_bytes, unfinished=True)
        self._state, self._ledger, self._log = state, ledger, log
        limit = self._config.limit
        self._prompts = prompts if prompts is None or limit is None else prompts.first(limit)
        self._groups = prompt_groups(self._prompts, self._config.by_column, log) if self._prompts else []
        self._round: list[tuple[str, bytes]] = []  # lines to write
        self._contradicted = False
        self._check_every, self._check_at = config.broker.heartbeat, 0.0

    def begin(self, version: int, resumed: bool = False) -> None:
        """Begin or resume the run at a version; an evaluation that was open when Redis was lost starts again."""
        due = self._state.open_evaluation
        if resumed and due is not None:
            self._restart(due, "Redis was lost")
        elif not resumed and not self._config.before_training:
            # The first version is not evaluated, unless it is the last one too.
            self._state.evaluated_to = min(version, self._state.last_version - 1)

    def withdraw(self) -> None:
        """Remove answers that the restored state does not count: Redis may have lost the end of its log."""
        if (due := self._state.open_evaluation) is not None:
            self._files.withdraw(due, self._state.admission.in_flight.__contains__)

    def all_sent(self) -> bool:
        """Always true: an evaluation is started as soon as it is due."""
        return True

    def start_due(self) -> None:
        """Send the next tasks of the open evaluation; if there is none, start the newest that is due."""
        under_way, due = self._state.open_evaluation, self._due()
        if self._prompts is None:
            return
        if under_way is not None:
            if self._state.evaluations[under_way].expected != self._asked():
                self._restart(under_way, "the data has other prompts")
            else:
                self._send(under_way)
        elif due is not None:
            self._ledger.renew()
            self._files.discard(due)  # left by another run in this folder
            self._start(due)

    def add(self, due: int, header: SampleHeader) -> None:
        """Count an answer to the evaluation that was due at a version."""
        if self._position(header.task_id) >= len(self._groups):
            # Prompts were removed from the data while the evaluation was running.
            self._state.count("ignored")
            self._contradicted = True
            return
        counts = self._state.evaluations[due]
        if counts.version < 0:
            pin = self._ledger.pin(self._state.evaluation_name(due))
            counts.version = -1 if pin is None else pin.version
        line = self._line(counts.version, header)  # first, so that an answer that cannot be written is not counted
        if header.status == "set_aside":
            counts.set_aside += 1
        else:
            counts.answered += 1
            counts.correct += header.reward >= self._right_from
            self._contradicted |= not header.oldest_version == header.newest_version == counts.version
        self._contradicted |= counts.version < 0
        self._round.append((header.task_id, line))

    def write(self) -> tuple[EvaluationCounts, dict[str, float]] | None:
        """Write the round's answers, or raise `UserError`; returns counts and figures once all answers are there."""
        # This round's answers may have completed the newest evaluation, which is then no longer open.
        due = self._state.open_evaluation if not self._round else max(self._state.evaluations)
        if due is None:
            return None
        if self._contradicted:
            # Redis failed over and forgot the version, or a generator answered with another one.
            self._restart(due, "answers came from several versions, or to prompts that are gone")
            return None
        if not self._round:
            self._check_version(due)
            return None
        counts = self._state.evaluations[due]
        self._files.write(counts.version, self._round)
        self._state.count("evaluated", len(self._round))
        self._round.clear()
        self._state.save_evaluation(due)
        return (counts, self._finish(due, counts)) if counts.complete else None

    def _due(self) -> int | None:
        version, every = self._state.version, self._config.every
        if version == BEFORE_FIRST_STEP:
            return None
        if not self._state.evaluations and self._config.before_training:
            return version
        is_last = version >= self._state.last_version
        due = version if is_last else version // every * every if every else BEFORE_FIRST_STEP
        return due if due > self._state.evaluated_to else None

    def _start(self, due: int) -> None:
        """Send the held-out prompts; one version, `due` or a newer one, answers all of them."""
        state = self._state
        state.start_evaluation(due, self._asked())
        self._log.info("evaluating", evaluation=state.evaluation_name(due), tasks=state.evaluations[due].expected)
        self._send(due)

    def _send(self, due: int) -> None:
        """Send the next tasks of an evaluation, in slices so that no commit is too large for Redis."""
        state, counts = self._state, self._state.evaluations[due]
        first, last = counts.dispatched, min(counts.dispatched + SLICE, counts.expected)
        if first == last or first - counts.answered - counts.set_aside > (SLICES_IN_FLIGHT - 1) * SLICE:
            return
        for n in range(first, last):
            task = self._task(due, f"{state.evaluation_name(due)}-{n}")
            state.dispatch(task, DispatchedTask(task.prompt_id, True, due, 0.0))
        counts.dispatched = last
        state.save_evaluation(due)

    def send_again(self, task_id: str) -> None:
        """Send again a task of the open evaluation that Redis has lost."""
        due = self._state.open_evaluation
        if due is None or self._position(task_id) >= len(self._groups):
            self._state.abandon_task(task_id)
        else:
            self._state.send_again(self._task(due, task_id))

    def _task(self, due: int, task_id: str) -> Task:
        assert self._prompts is not None
        return self._prompts.task(
            self._position(task_id),
            task_id,
            kind="eval",
            min_version=due,
            evaluation=self._state.evaluation_name(due),
            # The seed is the same however often the evaluation starts.
            seed=task_seed(self._run, f"e{due}-{_number(task_id)}"),
        )

    def _restart(self, due: int, reason: str) -> None:
        self._log.warning(
            "evaluation starts again", evaluation=self._state.evaluation_name(due), reason=reason,
            answers=self._state.evaluations[due].answered,
        )  # fmt: skip
        self._contradicted = False
        self._state.count("evaluated", len(self._round))  # `start_evaluation` subtracts them again
        self._round.clear()
        self._start(due)

    def _check_version(self, due: int) -> None:
        """Start the evaluation again if no generator with its version is left."""
        if time.monotonic() < self._check_at:
            return
        self._check_at = time.monotonic() + self._check_every
        pin = self._ledger.pin(self._state.evaluation_name(due))
        if pin is None and self._state.evaluations[due].version >= 0:
            self._restart(due, "Redis has lost its version")
        elif pin is not None and pin.unseen > self._ledger.broker.dead_after:
            self._restart(due, f"no generator has version {pin.version} any more")

    def _finish(self, due: int, counts: EvaluationCounts) -> dict[str, float]:
        """Figures of a complete evaluation, from its file, which holds every answer exactly once, even after kills."""
        rows = self._files.finish(counts.version, f"{self._state.evaluation_name(due)}-", due)
        positions = [self._position(row["task_id"]) for row in rows]
        responses = [
            Response(position, row["reward"], row["answer"]) for position, row in zip(positions, rows, strict=True)
        ]
        groups = [self._groups[position] for position in positions]
        figures = summarize_groups(responses, groups, self._config.samples, self._right_from)
        self._state.finish_evaluation(due, figures)
        return figures

    def _line(self, version: int, header: SampleHeader) -> bytes:
        assert self._prompts is not None
        prompt = self._prompts[self._position(header.task_id)]
        return episode_line(header, {"version": version, "answer": header.answer}, prompt.shown())

    def _asked(self) -> int:
        """Number of tasks of an evaluation."""
        return len(self._groups) * self._config.samples

    def _position(self, task_id: str) -> int:
        """The position of a task's prompt among those evaluated."""
        return _number(task_id) // self._config.samples


def _number(task_id: str) -> int:
    return int(task_id.rpartition("-")[2])


def prompt_groups(prompts: PromptSet, column: str | None, log: Any) -> list[list[str]]:
    """Names of the groups that each prompt is in: its data set if there are several, and `column=value`.

    A prompt without the column is in the group `column=none`; the number of such prompts is logged.

    Raises:
        UserError: no prompt has the column, or it has more than 32 values.
    """
    sources = [prompts.source(i) for i in range(len(prompts))]
    groups = [[name] if len(set(sources)) > 1 else [] for name in sources]
    if column is None:
        return groups
    rows = [prompts[i].row for i in range(len(prompts))]
    values = [_value(row, column) for row in rows]
    missing = values.count(None)
    if missing == len(values):
        columns = sorted({name for row in rows for name in row})
        near = get_close_matches(column, columns, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(columns) or 'no other columns'}"
        raise UserError(f"eval.by_column = {column!r} is in no row of data.heldout; {hint}")
    different = set(values)
    if len(different) > MAX_VALUES:
        raise UserError(
            f"eval.by_column = {column!r} has {len(different)} different values in data.heldout, and each would have "
            f"figures of its own; at most {MAX_VALUES} are allowed"
        )
    if missing:
        log.warning("held-out rows lack the column of eval.by_column", column=column, rows=missing, of=len(values))
    for names, value in zip(groups, values, strict=True):
        names.append(f"{column}={'none' if value is None else value}")
    return groups


def _value(row: dict[str, Any], column: str) -> str | None:
    """A column's value as part of a metric's name."""
    value = column_value(row, column)
    return None if value is None else " ".join(str(value).replace("/", "_").split())[:64]
