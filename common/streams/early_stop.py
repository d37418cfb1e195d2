"""Early stopping (`run.stop_when`): the best held-out reward so far, and the version at which the run then ends."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass
from typing import Self

import msgpack

from common.config.run import RunConfig
from common.streams.broker import Broker
from common.unpack import unpack

FIELD = "early_stop"  # of the sampler's state in Redis


@dataclass(slots=True)
class EarlyStop:
    """The best held-out reward of a run; the sampler keeps it in its state."""

    best: float = math.nan  # mean held-out reward, NaN before the first evaluation
    version: int = -1  # the weight version that reached `best`
    since: int = 0  # number of evaluations after that, none of which was better
    end: int = 0  # the last version of the run, chosen once `since` reached `run.stop_when`; 0 before that

    @classmethod
    def of(cls, broker: Broker) -> Self:
        """The state that the sampler committed last."""
        data = broker.redis.hget(broker.key("state"), FIELD)
        return cls.unpack(data) if data else cls()

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        return cls(*unpack(data))

    def pack(self) -> bytes:
        return msgpack.packb(astuple(self))

    def add(self, version: int, reward: float) -> None:
        """Add a complete evaluation. Once the end is chosen, nothing changes, so that the reason stays true.

        An evaluation without a single answer, such as during an outage, says nothing about the model: it is left out.
        """
        if self.end or math.isnan(reward):
            return
        if math.isnan(self.best) or reward > self.best:
            self.best, self.version, self.since = reward, version, 0
        else:
            self.since += 1

    def is_due(self, patience: int | None) -> bool:
        return patience is not None and self.since >= patience

    def holds(self, patience: int | None) -> bool:
        """Whether an end was chosen that also holds with this `run.stop_when`, which may have been raised since."""
        return self.end > 0 and self.is_due(patience)

    def last_version(self, steps: int, patience: int | None) -> int:
        return min(self.end, steps) if self.holds(patience) else steps

    def __str__(self) -> str:
        evaluations = f"{self.since} evaluation{'s' * (self.since != 1)}"
        return f"the held-out reward was no better for {evaluations}: best {self.best:.3g} at step {self.version}"


def to_continue(broker: Broker, run: RunConfig) -> str:
    """What a user must change to continue a finished run."""
    stop = EarlyStop.of(broker)
    if stop.holds(run.stop_when):
        return f"{stop}; to continue it, raise run.stop_when = {run.stop_when}, or remove it (-o run.stop_when=null)"
    return "give it more steps with -o run.steps=N"
