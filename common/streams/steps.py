"""The stream `steps`: each version that the learner announces, for all processes."""

from __future__ import annotations

import contextlib

from common.messages import InvalidMessage, Step
from common.streams.broker import Broker

STEPS_KEPT = 10_000
READ_BACK = 16  # newest steps that are tried until one can be read


class StepReader:
    """Reads announcements in order; `last` is the entry id to continue from after a restart."""

    def __init__(self, broker: Broker, after: str = "0") -> None:
        self._broker = broker
        self.last = after

    def read(self, count: int = 100, block_ms: int = 0) -> list[Step]:
        """New steps; waits up to `block_ms` for one (0: does not wait). Unreadable ones are skipped."""
        reply = self._broker.redis.xread({self._broker.key("steps"): self.last}, count=count, block=block_ms or None)
        steps = []
        for entry_id, fields in reply[0][1] if reply else []:
            self.last = entry_id.decode()
            try:
                steps.append(Step.unpack(fields.get(b"step", b"")))
            except InvalidMessage:
                continue
        return steps


def latest(broker: Broker) -> Step | None:
    """The newest announcement that can be read, if there is one."""
    for _, fields in broker.redis.xrevrange(broker.key("steps"), count=READ_BACK):
        with contextlib.suppress(InvalidMessage):
            return Step.unpack(fields.get(b"step", b""))
    return None
