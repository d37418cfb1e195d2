"""The sampler's lease, which one process of a run holds at a time, and the state that a new sampler reads."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass

from common.errors import UserError
from common.streams.broker import Broker

RENEW_EVERY = 0.25  # share of the lease's length after which it is renewed while the state is read
ROWS_A_CALL = 2000


class Replaced(UserError):
    """Another process has taken this one's place in the run; this one must not change the run any more."""


def owner_name() -> str:
    """A name for this process: host, process id, and random characters, since the first two may recur."""
    return f"{socket.gethostname()}/{os.getpid()}/{os.urandom(4).hex()}"


def is_dead_neighbour(owner: str) -> bool:
    """Whether an owner was a process of this host and has ended."""
    host, _, rest = owner.partition("/")
    pid = rest.partition("/")[0]
    if host != socket.gethostname() or not pid.isdigit():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


class LeaseLost(Exception):
    """Another sampler holds the run's lease."""


class RedisBehind(Exception):
    """Redis lacks a part of the run that this process or the run folder has; the run starts from a checkpoint."""


@dataclass
class LedgerState:
    """What Redis holds of a run when a sampler starts: fields as they were committed."""

    tracker: dict[str, bytes]
    open: dict[str, bytes]
    outstanding: dict[str, bytes]
    scalars: dict[str, bytes]


class SamplerLease:
    """The lease of one run, as one sampler sees it."""

    def __init__(self, broker: Broker, owner: str | None = None) -> None:
        self.owner = owner or owner_name()
        self.length_ms = int(1000 * broker.dead_after)
        self._broker = broker

    def take(self, wait: float | None = None) -> None:
        """Become the run's sampler.

        Waits until the lease of a sampler that died expires (at most `wait` seconds, by default a little longer than
        a lease lasts); a dead one on the same host is replaced at once.

        Raises:
            LeaseLost: another sampler is alive.
        """
        deadline = time.monotonic() + (self.length_ms / 1000 + 1 if wait is None else wait)
        dead = ""
        while (holder := self._hold(self.length_ms, dead)[0]) != self.owner:
            if is_dead_neighbour(holder):
                dead = holder
                continue
            if time.monotonic() > deadline:
                raise LeaseLost(f"run {self._broker.run!r} already has a sampler ({holder})")
            time.sleep(0.1)

    def renew(self) -> int:
        """Renew the lease, even if it has expired but is still free; returns the number of the last commit.

        Raises:
            LeaseLost: another sampler has it.
        """
        holder, sequence = self._hold(self.length_ms)
        if holder != self.owner:
            raise LeaseLost(f"run {self._broker.run!r} has another sampler now ({holder})")
        return sequence

    def release(self) -> None:
        """Give the lease back, so that a successor need not wait."""
        self._hold(0)

    def read(self) -> tuple[LedgerState, int]:
        """The run's state at one moment, and the number of the commit that made it.

        The state is read in slices, so that Redis answers others meanwhile and the lease can be renewed. Only commits
        change it, so it is read again if there was one in between.

        Raises:
            LeaseLost: another sampler has taken the lease meanwhile.
        """
        while True:
            sequence = self.renew()
            hashes = [self._read_hash(name) for name in ("tracker", "open", "outstanding", "state")]
            if self.renew() == sequence:
                return LedgerState(*hashes), sequence

    def _hold(self, length_ms: int, dead: str = "") -> tuple[str, int]:
        holder, sequence = self._broker.call("hold", ("lease", "state"), [self.owner, length_ms, dead])
        return holder.decode(), int(sequence)

    def _read_hash(self, name: str) -> dict[str, bytes]:
        fields: dict[str, bytes] = {}
        key, cursor, renewed = self._broker.key(name), 0, time.monotonic()
        while True:
            cursor, slice_ = self._broker.redis.hscan(key, cursor, count=ROWS_A_CALL)
            fields.update((field.decode(), value) for field, value in slice_.items())
            if cursor == 0:
                return fields
            if time.monotonic() - renewed > RENEW_EVERY * self.length_ms / 1000:
                self.renew()
                renewed = time.monotonic()
