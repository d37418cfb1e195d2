"""Heartbeats: each process publishes that it is alive and what it is doing."""

from __future__ import annotations

import os
import resource
import socket
import threading
from pathlib import Path
from typing import Any, Self

import msgpack
from redis.exceptions import RedisError

from common.streams.broker import Broker
from common.streams.lease import Replaced

FORGET_AFTER = 10  # times `dead_after`


class Presence:
    """A background thread that renews this process's entry every `interval` seconds."""

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
        broker = self._broker
        keys = [broker.key("processes"), broker.key("alive")]
        values = self._values | {"metrics": {**self._values.get("metrics", {}), **_usage()}}
        forget_ms = int(1000 * FORGET_AFTER * broker.dead_after)
        broker.script("present")(keys, [self.process_id, msgpack.packb(values), forget_ms])

    def start(self) -> Self:
        """Publish once, then go on in the background."""
        self.beat()
        self._thread.start()
        return self

    def stop(self, withdraw: bool = True) -> None:
        """Stop publishing; the process disappears from the list at once, unless its entry is another's by now."""
        self._stop.set()
        self._thread.join()
        if not withdraw:
            return
        pipe = self._broker.redis.pipeline(transaction=False)  # which a full Redis would refuse
        pipe.hdel(self._broker.key("processes"), self.process_id)
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
            except RedisError:
                # The process's own calls fail for the same reason and report it; a heartbeat only tries again.
                continue


def _usage() -> dict[str, float]:
    """What this process, without those that it has started, has used of the machine."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return {
        "process/cpu_seconds": usage.ru_utime + usage.ru_stime,
        "process/memory_mb": pages * resource.getpagesize() / 1e6,
    }
