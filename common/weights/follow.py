"""Follows the learner's newest weights, from whichever server is best, through all that may happen to servers."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import Any, Protocol

from common.config import Deltas
from common.errors import UserError
from common.network import host_of, is_this_machine
from common.weights.connection import Connection, ConnectionLost, Stopped
from common.weights.pull import TransferStats
from common.weights.sources import Source, Sources
from common.weights.wire import Manifest, life_of, supersedes

RETRY = 0.5  # seconds between looks for a server that is not there


class Puller(Protocol):
    """Brings a snapshot here, in the follower's thread."""

    def pull(self, connection: Connection, manifest: Manifest, stats: TransferStats) -> bool:
        """Bring it; False if the server has dropped it meanwhile. After `ConnectionLost` it may be asked again."""
        ...


class Follower:
    """Has each snapshot pulled that is newer than the last one.

    A relay that falls silent, sends wrong chunks or stays behind the learner is left for a while.

    Args:
        sources: where to pull from; asked before each connection and regularly while waiting.
        puller: brings the snapshots here.
        curve_dir: folder with the keys, if there are any.
        timeout: seconds of silence, or of staying behind, after which a server is given up.
        stopped: ends `run`.
        deltas: whether to ask for deltas: `on`, `off`, or `auto`: of servers on other machines.
        relay_id: own id where this is a relay's follower, so that it notices when it follows itself.
    """

    def __init__(
        self,
        sources: Sources,
        puller: Puller,
        curve_dir: str | None,
        *,
        timeout: float,
        stopped: threading.Event,
        deltas: Deltas = "off",
        relay_id: str = "",
        log: Any,
    ) -> None:
        self.stats = TransferStats()
        self.path: list[str] = []  # ids of the relays above, the nearest first
        self._sources, self._puller, self._curve_dir = sources, puller, curve_dir
        self._timeout, self._stopped, self._relay_id, self._log = timeout, stopped, relay_id, log
        self._deltas = deltas
        self._have = ""
        self._behind_since: float | None = None
        self._answered: set[str] = set()  # addresses

    def run(self) -> None:
        """Follow until stopped.

        Raises:
            UserError: keys are missing or wrong, a server speaks another protocol, a configured address serves no
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
        # Within a machine a whole snapshot is there sooner than deltas are made and unpacked.
        deltas = self._deltas == "on" or (self._deltas == "auto" and not is_this_machine(host_of(source.address)))
        connection = Connection(source, self._curve_dir, self._timeout, self._stopped.is_set, deltas=deltas)
        self.stats.source = source.relay or "learner"
        self._behind_since = None
        try:
            while self._pull_next(connection):
                pass
        except ConnectionLost as error:
            self._log.info("weights connection lost", reason=str(error), source=self.stats.source)
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
        if self._puller.pull(connection, manifest, self.stats):
            self._have = manifest.snapshot
            self._sources.worked(source)
        return True

    def _wants(self, source: Source, offer: Manifest) -> bool:
        """The learner's newest is always right; a relay may still offer an older one, or one of an earlier learner."""
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
        # One that was started again at the same address has another password.
        if best is not None and best.password not in ("", source.password):
            return True
        if not source.relay:
            return False
        if now - connection.heard > self._timeout:
            self._check_configured_address(connection)
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
        self._answered.add(connection.source.address)
        self.path = connection.path
        if self._relay_id and self._relay_id in self.path:
            circle = [self._relay_id, *self.path[: self.path.index(self._relay_id) + 1]]
            raise UserError(
                f"--upstream {connection.source.address} leads back to this relay ({' <- '.join(circle)}): relays "
                "may chain, but the first must pull from the learner"
            )

    def _check_configured_address(self, connection: Connection) -> None:
        """Refuse an address given by the user at which something listens that is no weight server."""
        source = connection.source
        if not source.configured or source.address in self._answered:
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
