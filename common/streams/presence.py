"""Heartbeats: each process publishes that it is alive and what it is doing."""

from __future__ import annotations

import math
import os
import resource
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import msgpack
from redis.exceptions import RedisError

from common.streams.broker import Broker
from common.streams.lease import Replaced

FORGET_AFTER = 10  # times `dead_after`
LEARNER = "learner"  # the only process with this name; its last heartbeat is never forgotten
WARN_AFTER = 3  # times `dead_after`: by then a supervisor has had time to start the learner again


class Presence:
    """A background thread that renews this process's entry every `interval` seconds."""

    # Returns metrics that each heartbeat adds to those of the status.
    measured: Callable[[], dict[str, float]] = dict

    def __init__(self, broker: Broker, process_id: str, role: str, interval: float = 1.0) -> None:
        self.process_id = process_id
        self._broker = broker
        self._interval = interval
        self._values: dict[str, Any] = {
            "role": role,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "state": "starting",
        }
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="presence", daemon=True)

    def status(self, **values: Any) -> None:
        """Change what the others see with the next heartbeat."""
        self._values = self._values | values

    def beat(self) -> None:
        values = self._values | {"metrics": {**self._values.get("metrics", {}), **_usage(), **self.measured()}}
        forget_ms = int(1000 * FORGET_AFTER * self._broker.dead_after)
        self._broker.call("present", ("processes", "alive"), [self.process_id, msgpack.packb(values), forget_ms])

    def start(self) -> Self:
        """Publish once, then continue in the background."""
        self.beat()
        self._thread.start()
        return self

    def stop(self, withdraw: bool = True) -> None:
        """Stop publishing. `withdraw` also removes the entry; pass False if another process may own it by now."""
        self._stop.set()
        self._thread.join()
        if not withdraw:
            return
        pipe = self._broker.redis.pipeline(transaction=False)  # a full Redis would refuse a transaction
        pipe.hdel(self._broker.key("processes"), self.process_id)
        if self.process_id != LEARNER:  # so that others can say since when it has been gone
            pipe.zrem(self._broker.key("alive"), self.process_id)
        pipe.execute()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.stop(withdraw=kind is None or not issubclass(kind, Replaced))

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            try:
                self.beat()
            except (RedisError, OSError):
                # The process's own calls fail for the same reason and report it; a heartbeat only tries again. OSError:
                # no descriptor is left to read /proc with.
                continue


def learner_gone(broker: Broker) -> float | None:
    """Seconds since the learner's last heartbeat; None before its first, and while it is alive (below `dead_after`)."""
    pipe = broker.redis.pipeline(transaction=False)
    pipe.time()
    pipe.zscore(broker.key("alive"), LEARNER)
    (seconds, micros), last = pipe.execute()
    gone = -1.0 if last is None else seconds + micros / 1e6 - last / 1000
    return gone if gone >= broker.dead_after else None


class LearnerWatch:
    """Warns, in a process that waits for the learner, once the learner has long been gone, and at growing intervals."""

    def __init__(self, broker: Broker, log: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._broker, self._log, self._clock = broker, log, clock
        self._look_at = -math.inf
        self._warn_at = self._first = WARN_AFTER * broker.dead_after  # seconds without the learner

    def look(self) -> None:
        """Warn if it is time to; asks Redis at most once in `dead_after` seconds."""
        if self._clock() < self._look_at:
            return
        self._look_at = self._clock() + self._broker.dead_after
        gone = learner_gone(self._broker)
        if gone is None and self._warn_at > self._first:
            self._log.info("the learner is back")
        if gone is None:
            self._warn_at = self._first
        elif gone >= self._warn_at:
            self._log.warning(gone_line(gone) + "; start it again: it continues from its newest checkpoint")
            self._warn_at = 2 * gone


def gone_line(seconds: float) -> str:
    return f"the learner has been gone for {seconds:.0f} s"


def _usage() -> dict[str, float]:
    """CPU time and memory of this process, without its children."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return {
        "process/cpu_seconds": usage.ru_utime + usage.ru_stime,
        "process/memory_mb": pages * resource.getpagesize() / 1e6,
    }
