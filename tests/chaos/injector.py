"""Does faults to a run on this machine: to its processes, its Redis, and the connections between them."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis

from launcher.run.supervisor import RunProcess, Supervisor
from tests.chaos.proxy import Mode, Proxy
from tests.chaos.schedule import Fault

MAX_GENERATORS = 3
LOG_TAIL = 4096  # bytes at most that the log of Redis loses
FILE_LIMIT = 2048  # bytes of a file, while the disk is full
DISTURBANCES: dict[str, Mode] = {
    "slow connections": "slow",
    "hold connections": "held",
    "half-close connections": "half-closed",
    "lose replies": "mute",
}


@dataclass(frozen=True, slots=True)
class Tally:
    """Faults by kind: those that were done, and those that met nothing that they could have been done to."""

    done: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)


class Injector:
    """Takes one fault after the other from a schedule, while the run is watched.

    Args:
        tally: gets what was done.
        client: of the run's Redis, past the proxy.
        folder: of Redis's append-only log.
        new_generator: starts another generator.
    """

    def __init__(
        self,
        faults: Iterator[Fault],
        tally: Tally,
        proxy: Proxy,
        client: redis.Redis,
        folder: Path,
        supervisor: Supervisor,
        new_generator: Callable[[], None],
        dead_after: float,
        log: Any,
    ) -> None:
        self._faults, self._tally, self._proxy, self._client, self._folder = faults, tally, proxy, client, folder
        self._supervisor, self._new_generator, self._dead_after, self._log = supervisor, new_generator, dead_after, log
        self._fault = next(faults)
        self._due = time.monotonic() + self._fault.after
        self._undo: Callable[[], Any] | None = None
        self._until = 0.0
        self._leaving: set[int] = set()  # process ids

    def poll(self) -> None:
        """Do the next fault if it is due, and undo the one that has lasted long enough."""
        now = time.monotonic()
        if self._undo is not None:
            if now >= self._until:
                self.heal()
                self._due = now + self._fault.after
            return
        if now >= self._due:
            fault, self._fault = self._fault, next(self._faults)
            hit = self._do(fault)
            (self._tally.done if hit else self._tally.skipped)[fault.kind] += 1
            self._supervisor.timeline.instant(f"fault: {fault.kind}", hit=hit or "nothing")
            self._log.warning("fault", number=fault.number, kind=fault.kind, hit=hit or "nothing")
            if self._undo is None:
                self._due = time.monotonic() + self._fault.after

    def heal(self) -> None:
        undo, self._undo = self._undo, None
        if undo is not None:
            with contextlib.suppress(redis.RedisError, ProcessLookupError):
                undo()

    def _do(self, fault: Fault) -> str:
        """Do a fault; returns what it hit, or '' if there was nothing to hit."""
        verb, _, object_ = fault.kind.partition(" ")
        if fault.kind in DISTURBANCES:
            number = self._proxy.disturb(DISTURBANCES[fault.kind], fault.share, fault.seed)
            return self._for(fault.seconds, self._proxy.heal, _connections(number))
        if fault.kind == "cut connections":
            return _connections(self._proxy.cut(fault.share, fault.seed))
        if verb == "kill":
            return self._kill(object_, fault)
        if verb == "freeze":
            return self._freeze(object_, fault)
        return {
            "cut redis's log": self._cut_log,
            "memory full": self._fill_memory,
            "disk full": self._fill_disk,
            "panic tools": self._raise_flag,
            "fork rewards": self._raise_flag,
            "more generators": self._add_generator,
            "fewer generators": self._remove_generator,
        }[fault.kind](fault)

    def _for(self, seconds: float, undo: Callable[[], Any], hit: str) -> str:
        self._undo, self._until = undo, time.monotonic() + seconds
        return hit

    def _one(self, role: str, fault: Fault) -> RunProcess | None:
        running = [child for child in self._supervisor.alive(role) if child.state == "running"]
        return random.Random(fault.seed).choice(running) if running else None

    def _kill(self, role: str, fault: Fault) -> str:
        child = self._one(role, fault)
        if child is None:
            return ""
        os.kill(child.pid, signal.SIGKILL)
        return child.name

    def _freeze(self, role: str, fault: Fault) -> str:
        """Stop a process and all that it has started."""
        child = self._one(role, fault)
        if child is None:
            return ""
        group = child.pid
        os.killpg(group, signal.SIGSTOP)
        return self._for(fault.seconds * self._dead_after, lambda: os.killpg(group, signal.SIGCONT), child.name)

    def _cut_log(self, fault: Fault) -> str:
        """Redis dies, and what it wrote last is gone: it goes back in time."""
        name = self._kill("redis", fault)
        if name:
            # Not collected: the supervisor does that, and starts it again.
            os.waitid(os.P_PID, self._supervisor.children[name].pid, os.WEXITED | os.WNOWAIT)
            # One file before Redis 7.
            logs = [*self._folder.rglob("*.incr.aof"), *self._folder.glob("appendonly.aof")]
            newest = max((path for path in logs if path.is_file()), key=lambda path: path.stat().st_mtime)
            size = newest.stat().st_size
            lost = random.Random(fault.seed).randrange(1, LOG_TAIL)
            os.truncate(newest, max(0, size - lost))
            name += f", {min(lost, size)} bytes of its log"
        return name

    def _fill_memory(self, fault: Fault) -> str:
        """No write that needs memory is accepted any more."""
        try:
            self._client.config_set("maxmemory", 1)
        except redis.RedisError:
            return ""
        return self._for(fault.seconds, lambda: self._client.config_set("maxmemory", 0), "redis")

    def _fill_disk(self, fault: Fault) -> str:
        """Files of the sampler or the learner cannot grow: to write beyond a few bytes fails as on a full disk."""
        role = random.Random(fault.seed).choice(["sampler", "learner"])
        child = self._one(role, fault)
        if child is None:
            return ""
        pid = child.pid
        before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (FILE_LIMIT, before[1]))
        return self._for(fault.seconds, lambda: resource.prlimit(pid, resource.RLIMIT_FSIZE, before), child.name)

    def _raise_flag(self, fault: Fault) -> str:
        """The run's own tool or reward fails while there is a file."""
        path = flag(self._folder.parent, fault.kind)
        path.touch()
        return self._for(fault.seconds, lambda: path.unlink(missing_ok=True), fault.kind.partition(" ")[2])

    def _add_generator(self, fault: Fault) -> str:
        if len(self._supervisor.alive("generator")) >= MAX_GENERATORS:
            return ""
        self._new_generator()
        return "a new one"

    def _remove_generator(self, fault: Fault) -> str:
        """As a user does it: with SIGTERM. One that is told to leave needs time for it, and may not be the last."""
        staying = [
            child
            for child in self._supervisor.alive("generator")
            if child.state == "running" and child.pid not in self._leaving
        ]
        if len(staying) < 2:
            return ""
        child = random.Random(fault.seed).choice(staying)
        self._leaving.add(child.pid)
        os.kill(child.pid, signal.SIGTERM)
        return child.name


def flag(folder: Path, kind: str) -> Path:
    """The file whose presence makes the parts of the run in a folder fail (`tests.chaos.parts`)."""
    return folder / f"chaos-{kind.replace(' ', '-')}"


def _connections(number: int) -> str:
    return f"{number} connections" if number else ""
