"""Checks results before they are counted; notices when all tasks fail, and when all rewards are equal."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from typing import Any

from common.answers import in_range
from common.config import Config, SamplerConfig
from common.errors import UserError, one_line
from common.messages import Failure, InvalidMessage, SampleHeader
from common.payload import open_record
from sampler.records import DispatchedTask

MIN_LIMIT = 64  # tasks
EQUAL_BATCHES = 5  # in a row, before a warning
EXAMPLES = 3  # answers shown in the warning
MAX_TEXT = 60  # characters of the output and of the expected answer


def checked(header: SampleHeader, task: DispatchedTask, config: Config) -> SampleHeader:
    """The header with rewards in the declared range; that of a skipped task is returned unchanged.

    Raises:
        InvalidMessage: the result cannot be counted; the text says why.
    """
    if header.status == "set_aside":
        return header
    if header.prompt_id != task.prompt_id:
        raise InvalidMessage(
            f"it answers prompt {header.prompt_id[:100]!r}, but its task asks {task.prompt_id[:100]!r}"
        )
    if (header.kind != "train") != task.evaluation:
        wanted = "" if task.evaluation else "not "
        raise InvalidMessage(f"it is of kind {header.kind}, but its task was {wanted}part of an evaluation")
    if header.newest_version > config.run.steps:
        raise InvalidMessage(f"version {header.newest_version} answered it, but run.steps is {config.run.steps}")
    by_turn = config.algorithm.turn_advantage == "turn"
    if not task.evaluation and bool(header.turn_returns) != by_turn:
        raise InvalidMessage(
            f"it has {len(header.turn_returns)} turn_returns, with algorithm.turn_advantage = "
            f"{config.algorithm.turn_advantage!r}"
        )
    low, high = config.sampler.tracker.reward_range
    try:
        reward = in_range(header.reward, low, high)
        returns = [in_range(value, low, high) for value in header.turn_returns]
    except ValueError as error:
        raise InvalidMessage(f"{error}; set it to the range of your rewards") from None
    if reward == header.reward and returns == header.turn_returns:
        return header  # the usual case; a copy costs as much as all the checks above
    return header.model_copy(update={"reward": reward, "turn_returns": returns})


def refused(header: SampleHeader, task: DispatchedTask, reason: str) -> SampleHeader:
    """A header that counts the task as skipped, in place of one that cannot be counted."""
    return SampleHeader.skipped(
        header.task_id,
        Failure.INVALID_RESULT,
        f"its result cannot be counted: {reason}"[:2000],
        prompt_id=task.prompt_id,
        kind=header.kind,
        record=header.record,
        generator=header.generator,
    )


class FailureLimit:
    """Counts tasks skipped in a row, to stop a run in which none is answered any more.

    An answer resets the count; prompts that can never be answered do not count. The default limit is the number of
    tasks that can be outstanding, because all of these may fail at the same moment.
    """

    def __init__(self, config: SamplerConfig) -> None:
        outstanding = (config.max_staleness + 1) * config.batch_size
        self.limit = config.max_set_aside or max(MIN_LIMIT, outstanding)
        self.in_a_row = 0
        self._reason = ""

    def add(self, header: SampleHeader) -> None:
        if header.status == "ok":
            self.in_a_row = 0
        elif not header.retire:
            self.in_a_row += 1
            self._reason = header.reason

    def check(self) -> None:
        """Raise `UserError` above the limit."""
        if self.in_a_row > self.limit:
            raise UserError(
                f"{self.in_a_row} tasks in a row were skipped, and none was answered between them "
                f"(sampler.max_set_aside = {self.limit}); the last one: {self._reason}; fix that and start again: the "
                "run continues where it stopped"
            )


class EqualRewards:
    """Warns once if all rewards were equal in each of several batches in a row: nothing can be learned from these."""

    def __init__(self, log: Any) -> None:
        self._log, self._in_a_row, self._warned = log, 0, False
        self._records: deque[bytes] = deque(maxlen=EXAMPLES)

    def add(self, header: SampleHeader) -> None:
        if header.record:
            self._records.append(header.record)

    def batch_closed(self, rewards: Sequence[float]) -> None:
        self._in_a_row = self._in_a_row + 1 if min(rewards) == max(rewards) else 0
        if self._in_a_row < EQUAL_BATCHES or self._warned:
            return
        self._warned = True
        answers = "; ".join(filter(None, map(_shown, self._records))) or "none was kept (episode.rollouts_every)"
        self._log.warning(
            f"nothing to learn: in each of the last {EQUAL_BATCHES} batches all rewards were equal (now "
            f"{rewards[0]:g}); check episode.reward, or start with easier prompts; answers: {answers}"
        )


def _shown(record: bytes) -> str:
    """An answer beside the one that was expected; empty if the record cannot be read."""
    try:
        episode = json.loads(open_record(record))
    except (InvalidMessage, ValueError, RecursionError):
        return ""
    output, expected = (repr(one_line(str(episode.get(name))))[:MAX_TEXT] for name in ("output", "gts"))
    return f"{output} (expected {expected})"
