"""Injects faults into a run on this machine: into its processes, its Redis, and the connections between them."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import select
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis

from common.keeper import descendants
from common.streams.broker import Broker
from generator.agents.containers.engine import ContainerEngine
from launcher.run.supervisor import RunProcess, Supervisor
from tests.chaos.containers import engine_process, kill_some
from tests.chaos.disk import Disk, newest_log
from tests.chaos.proxy import Mode, Proxy
from tests.chaos.schedule import CONTAINERS, Fault
from tests.chaos.strangers import Strangers

MOST = 3  # generators
LOG_TAIL = 4096  # bytes at most that a cut log of Redis loses
AGE = (0.5, 5.0)  # seconds by which an older log is older than the newest checkpoint
LONGEST_AGE = 30.0  # seconds that an older log may be old
FILE_LIMIT = 2048  # bytes of a file, while the disk is full
DISTURBANCES: dict[str, Mode] = {
    "slow connections": "slow",
    "hold connections": "held",
    "half-close connections": "half-closed",
    "lose replies": "mute",
}


@dataclass(frozen=True, slots=True)
class Tally:
    """Faults by kind: those that were done, and those that were skipped for lack of a target."""

    done: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)


class Blackout(Exception):
    """All processes were killed, as by a power cut: data that was not on the disk is lost, and the run starts again."""


@dataclass
class Injector:
    """Takes one fault after the other from a schedule, while the run is watched.

    Attributes:
        tally: gets what was done.
        broker: of the run, past the proxy.
        folder: of Redis's append-only log.
        disk: of the run folder.
        start_one: starts another generator.
        next: the fault that is due next.
    """

    faults: Iterator[Fault]
    tally: Tally
    proxy: Proxy
    broker: Broker
    folder: Path
    disk: Disk
    supervisor: Supervisor
    start_one: Callable[[], None]
    log: Any

    def __post_init__(self) -> None:
        self.next = next(self.faults)
        self._due = time.monotonic() + self.next.after
        self._undo: Callable[[], Any] | None = None
        self._until = 0.0
        self._leaving: set[int] = set()  # process ids

    def poll(self) -> None:
        """Do the next fault if it is due, and undo the one that has lasted long enough.

        Raises:
            Blackout: the fault was a power cut.
        """
        self.disk.look()
        now = time.monotonic()
        if self._undo is not None:
            if now >= self._until:
                self.heal()
                self._due = now + self.next.after
            return
        if now >= self._due:
            fault, self.next = self.next, next(self.faults)
            hit = self._do(fault)
            (self.tally.done if hit else self.tally.skipped)[fault.kind] += 1
            self.supervisor.timeline.instant(f"fault: {fault.kind}", hit=hit or "nothing")
            self.log.warning("fault", number=fault.number, kind=fault.kind, hit=hit or "nothing")
            if hit and fault.kind == "power cut":
                raise Blackout
            if self._undo is None:
                self._due = time.monotonic() + self.next.after

    def heal(self) -> None:
        undo, self._undo = self._undo, None
        if undo is not None:
            with contextlib.suppress(redis.RedisError, ProcessLookupError):
                undo()

    def _do(self, fault: Fault) -> str:
        """Do a fault; returns its target, or '' if there was none."""
        verb, _, object_ = fault.kind.partition(" ")
        if fault.kind in DISTURBANCES:
            number = self.proxy.disturb(DISTURBANCES[fault.kind], fault.share, fault.seed)
            return self._for(fault.seconds, self.proxy.heal, _connections(number))
        if fault.kind == "cut connections":
            return _connections(self.proxy.cut(fault.share, fault.seed))
        if fault.kind in CONTAINERS:
            return self._kill_containers(fault) if verb == "kill" else self._freeze_engine(fault)
        if verb == "kill":
            return self._kill(object_, fault)
        if verb == "freeze":
            return self._freeze(object_, fault)
        if verb == "more":
            return self._add()
        if verb == "fewer":
            return self._remove(fault)
        return {
            "cut redis's log": self._cut_log,
            "older redis log": self._cut_log,
            "memory full": self._fill_memory,
            "disk full": self._fill_disk,
            "panic tools": self._raise_flag,
            "fork rewards": self._raise_flag,
            "strangers": self._send_strangers,
            "power cut": self._kill_all,
        }[fault.kind](fault)

    def _for(self, seconds: float, undo: Callable[[], Any], hit: str) -> str:
        self._undo, self._until = undo, time.monotonic() + seconds
        return hit

    def _one(self, role: str, fault: Fault) -> RunProcess | None:
        running = [child for child in self.supervisor.alive(role) if child.state == "running"]
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
        return self._for(fault.seconds * self.broker.dead_after, lambda: os.killpg(group, signal.SIGCONT), child.name)

    def _kill_containers(self, fault: Fault) -> str:
        """Kill containers of agents, also those that wait for a task."""
        number = kill_some(ContainerEngine(attempts=1), self.broker.run, fault.share, fault.seed)
        return f"{number} containers" if number else ""

    def _freeze_engine(self, fault: Fault) -> str:
        """Stop the engine of the agents' containers, which run on; its clients wait."""
        pid = engine_process(ContainerEngine())
        if pid is None:
            return ""
        try:
            os.kill(pid, signal.SIGSTOP)
        except PermissionError:
            return ""
        return self._for(fault.seconds * self.broker.dead_after, lambda: os.kill(pid, signal.SIGCONT), "engine")

    def _cut_log(self, fault: Fault) -> str:
        """Redis dies, and what it wrote last is gone: it goes back in time."""
        name = self._kill("redis", fault)
        if name:
            # Not collected: the supervisor does that, and starts it again.
            os.waitid(os.P_PID, self.supervisor.children[name].pid, os.WEXITED | os.WNOWAIT)
            log = newest_log(self.folder)
            size, drawn = log.stat().st_size, random.Random(fault.seed)
            if fault.kind == "older redis log":
                # Older than the newest checkpoint, if that can be.
                saved, now = self.disk.newest_checkpoint(), time.time()
                at = (saved if now - saved < LONGEST_AGE else now) - drawn.uniform(*AGE)
                kept = self.disk.size(log, max(at, self.disk.since))
            else:
                kept = max(0, size - drawn.randrange(1, LOG_TAIL))
            os.truncate(log, kept)
            name += f", {size - kept} bytes of its log"
        return name

    def _fill_memory(self, fault: Fault) -> str:
        """Redis accepts no write that needs memory."""
        try:
            self.broker.redis.config_set("maxmemory", 1)
        except redis.RedisError:
            return ""
        return self._for(fault.seconds, lambda: self.broker.redis.config_set("maxmemory", 0), "redis")

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
        """Create the file in whose presence the run's own tool, agent or reward fails."""
        path = flag(self.folder.parent, fault.kind)
        path.touch()
        return self._for(fault.seconds, lambda: path.unlink(missing_ok=True), fault.kind.partition(" ")[2])

    def _kill_all(self, fault: Fault) -> str:
        """Kill every process of the run, and what they have started, at once; returns when all are dead."""
        if not self.disk.knows_syncs():
            return ""
        running = [child.pid for child in self.supervisor.children.values() if child.state == "running"]
        with contextlib.ExitStack() as stack:
            handles = []
            for pid in (one for child in running for one in descendants(child)):
                with contextlib.suppress(ProcessLookupError):
                    handles.append(os.pidfd_open(pid))
                    stack.callback(os.close, handles[-1])
            for handle in handles:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
            for handle in handles:
                dead = select.poll()
                dead.register(handle, select.POLLIN)
                dead.poll()  # readable once it is dead; the supervisor collects it
        return f"{len(handles)} processes"

    def _send_strangers(self, fault: Fault) -> str:
        """Connections from outside the run reach the learner's server of weights."""
        with contextlib.suppress(redis.RedisError):
            if endpoint := self.broker.endpoint("weights"):
                return self._for(fault.seconds, Strangers(endpoint["address"], fault.seed).leave, "learner")
        return ""

    def _add(self) -> str:
        if len(self.supervisor.alive("generator")) >= MOST:
            return ""
        self.start_one()
        return "a new one"

    def _remove(self, fault: Fault) -> str:
        """Stop a generator by SIGTERM, as a user does, unless it is the last; leaving takes it some time."""
        staying = [
            child
            for child in self.supervisor.alive("generator")
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
