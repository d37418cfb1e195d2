"""The teachers' side: lease finished episodes, and send each on to the sampler once, with a teacher's scores.

A training episode whose source has a teacher waits in the stream `scoring:NAME`, with its tokens under `payload:ID`,
until a process of that teacher has scored it. Only then is its header a sample.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.config import Config, TeacherConfig
from common.messages import Failure, SampleHeader
from common.payload import Payload
from common.streams.broker import Broker
from common.streams.inbox import Delivery, Finished, Inbox, Stage, readable

GROUP = "teachers"


def stream(teacher: str) -> str:
    """Name of the stream of what a teacher is to score."""
    return f"scoring:{teacher}"


def teachers(config: Config) -> dict[str, TeacherConfig]:
    """The teachers that have processes of their own, by the names of their streams."""
    return {name: teacher for name, teacher in config.teachers_in_use().items() if teacher.has_process}


def teacher_of(teacher: TeacherConfig, config: Config) -> str:
    """The name of a source's teacher; "" where no process scores its episodes."""
    return next((name for name, used in teachers(config).items() if used == teacher), "")


def streams(config: Config) -> list[str]:
    """Names of the streams of all these teachers."""
    return [stream(name) for name in teachers(config)]


class ScoringInbox(Inbox[SampleHeader]):
    """One process's share of what a teacher is to score."""

    def __init__(self, broker: Broker, name: str, teacher: str) -> None:
        super().__init__(broker, name, Stage(stream(teacher), GROUP, "header", SampleHeader))

    def payloads(self, deliveries: Sequence[Delivery[SampleHeader]]) -> list[Payload | None]:
        """Tokens of the episodes; None where they are missing or invalid."""
        return self._broker.payloads("payload", [delivery.task.task_id for delivery in deliveries])

    def set_aside(self, delivery: Delivery[SampleHeader], failure: Failure, reason: str) -> Finished:
        """The result of an episode that cannot be scored: its reward counts nothing, and it becomes a dead letter."""
        reason = readable(reason)
        header = delivery.task.model_copy(update={"status": "set_aside", "failure": failure, "reason": reason})
        return Finished(delivery.entry_id, header, dead_letter=self._letter(delivery, reason))
