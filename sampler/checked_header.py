"""What a result says, checked against its task and the run, before anything of it is counted."""

from __future__ import annotations

from common.answers import in_range
from common.config import Config
from common.messages import InvalidMessage, SampleHeader
from sampler.records import DispatchedTask


def checked(header: SampleHeader, task: DispatchedTask, config: Config) -> SampleHeader:
    """The header, its rewards within the declared range; one that was set aside by its generator as it is.

    Raises:
        InvalidMessage: it cannot be counted, for the reason in the text.
    """
    if header.status == "set_aside":
        return header
    if header.prompt_id != task.prompt_id:
        raise InvalidMessage(f"it answers prompt {header.prompt_id[:100]!r}, and was asked {task.prompt_id[:100]!r}")
    if (header.kind != "train") != task.evaluation:
        wanted = "" if task.evaluation else "not "
        raise InvalidMessage(f"it is of kind {header.kind}, and its task was {wanted}of an evaluation")
    if header.newest_version > config.run.steps:
        raise InvalidMessage(f"version {header.newest_version} answered it, and run.steps is {config.run.steps}")
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
        raise InvalidMessage(f"{error}; declare the range of your rewards there") from None
    if reward == header.reward and returns == header.turn_returns:
        return header  # nearly always, and a copy costs as much as all of the above
    return header.model_copy(update={"reward": reward, "turn_returns": returns})


def refused(header: SampleHeader, task: DispatchedTask, reason: str) -> SampleHeader:
    """What is counted in place of a header that cannot be: its task as set aside."""
    return SampleHeader(
        task_id=header.task_id,
        prompt_id=task.prompt_id,
        kind=header.kind,
        status="set_aside",
        reason=f"its result cannot be counted: {reason}"[:2000],
        record=header.record,
        generator=header.generator,
    )
