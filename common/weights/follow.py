"""Follows the learner's newest weights, from whichever server is best, through all that may happen to servers."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import Any, Protocol

from common.config import WeightsConfig
from common.errors import UserError
from common.weights.pull import Connection, ConnectionLost, Stopped, Transfer, TransferStats
from common.weights.sources import Source, Sources
from common.weights.wire import Manifest, life_of, supersedes

RETRY = 0.5  # seconds between looks for a server that is not there


class Receiver(Protocol):
    """Takes what arrives, all in the follower's thread."""

    def begin(self, manifest: Manifest) -> None:
        """A snapshot is on its way; one that was before it and has not ended never will."""
        ...

    def chunk(self, index: int, data: memoryview) -> None:
        """One chunk of it, verified."""
        ...

    def end(self, seconds: float) -> None:
        """All chunks are there; pulling took `seconds`."""
        ...


class Follower:
    """Pulls whatever snapshot is newer than the one pulled last.

    A transfer that is cut off goes on with the chunks that are missing, also from another server: a snapshot has the
    same name and checksums everywhere. A relay that falls silent, sends wrong chunks or stays behind the learner is
    left for a while.

    Args:
        sources: where to pull from; asked before each connection and regularly while waiting.
        config: the run's `learner.weights`.
        receiver: gets the weights.
        timeout: seconds of silence, or of staying behind, after which a server is given up.
        stopped: ends `run`.
        me: own id where this is a relay's follower, so that it notices when it follows itself.
    """

    def __init__(
        self,
        sources: Sources,
        config: WeightsConfig,
        receiver: Receiver,
        *,
        timeout: float,
        stopped: threading.Event,
        me: str = "",
        log: Any,
    ) -> None:
        self.stats = TransferStats()
        self.path: list[str] = []  # ids of the relays above, the nearest first
        self._sources, self._config, self._receiver = sources, config, receiver
        self._timeout, self._stopped, self._me, self._log = timeout, stopped, me, log
        self._have = ""
        self._transfer: Transfer | None = None
        self._behind_since: float | None = None
        self._met: set[str] = set()  # addresses that have answered

    def run(self) -> None:
        """Follow until stopped.

        Raises:
            UserError: keys are missing or wrong, a server speaks another protocol, a given address serves no
                weights, or relays follow one another in a circle.
        """
        with contextlib.suppress(Stopped):
            while not self._stopped.is_set():
                source = self._choose()
                if source is None:
                    self._stopped.wait(RETRY)
                else:
                    self._follow(source)

    def _follow(self, source: Source) -> None:
        """Pull from one server until it fails or there is a better one."""
        connection = Connection(source, self._config, self._timeout, self._stopped.is_set, self.stats)
        self.stats.source = source.relay or "learner"
        self._behind_since = None
        try:
            while self._pull_next(connection):
                pass
        except ConnectionLost as lost:
            self._log.info("weights connection lost", reason=str(lost), source=self.stats.source)
            self.stats.reconnects += 1
            self._sources.failed(source)
            self._stopped.wait(RETRY)
        finally:
            connection.close()

    def _pull_next(self, connection: Connection) -> bool:
        """Wait for a snapshot and pull it; False if it is time to go elsewhere."""
        source = connection.source
        manifest = connection.wait_for(
            self._have, lambda offer: self._wants(source, offer), lambda: self._should_leave(connection)
        )
        if manifest is None:
            return False
        self._behind_since = None
        if self._transfer is None or self._transfer.manifest != manifest:
            self._transfer = Transfer(manifest)
            self._receiver.begin(manifest)
        if connection.pull(self._transfer, self._receiver.chunk):
            seconds, self._transfer = self._transfer.seconds, None
            self._have = manifest.snapshot
            self._sources.worked(source)
            self._receiver.end(seconds)
        return True

    def _wants(self, source: Source, offer: Manifest) -> bool:
        """What the learner serves is always right; a relay may still have what is older, or of a life that is over."""
        if not source.relay:
            return offer.snapshot != self._have
        if life_of(offer.snapshot) == life_of(self._have):
            return supersedes(offer.snapshot, self._have)
        newest = self._sources.newest
        return not newest or life_of(newest) == life_of(offer.snapshot)

    def _should_leave(self, connection: Connection) -> bool:
        self._note_path(connection)
        best = self._choose()
        source, now = connection.source, time.monotonic()
        if best is not None and best.address != source.address:
            return True
        if not source.relay:
            return False
        if now - connection.heard > self._timeout:
            self._refuse_stranger(connection)
            raise ConnectionLost(f"{source.address} has been silent for {self._timeout:g} s")
        if self._sources.newest in ("", self._have):
            self._behind_since = None
        elif self._behind_since is None:
            self._behind_since = now
        elif now - self._behind_since > self._timeout:
            raise ConnectionLost(f"{source.address} has been behind the learner for {self._timeout:g} s")
        return False

    def _note_path(self, connection: Connection) -> None:
        if connection.path is None:
            return
        self._met.add(connection.source.address)
        self.path = connection.path
        if self._me and self._me in self.path:
            circle = [self._me, *self.path[: self.path.index(self._me) + 1]]
            raise UserError(
                f"--upstream {connection.source.address} leads back to this relay ({' <- '.join(circle)}): relays "
                "may chain, but the first must pull from the learner"
            )

    def _refuse_stranger(self, connection: Connection) -> None:
        """Something listens at the address a user gave, and has never said anything a server of weights would say."""
        source = connection.source
        if not source.given or source.address in self._met:
            return
        host, _, port = source.address.removeprefix("tcp://").rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=self._timeout).close()
        except OSError:
            return
        raise UserError(
            f"what listens at {source.address} serves no weights, or has other keys: give the address of a learner or "
            "a relay of this run, and the same learner.weights.curve_dir"
        )

    def _choose(self) -> Source | None:
        try:
            return self._sources.choose()
        except UserError:
            raise
        except Exception as error:
            self._log.warning("cannot look up the weights address", reason=str(error))
            return None
