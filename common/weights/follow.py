"""Follows the learner's newest weights: chooses a server, and another one if it fails."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from common.config import WeightsConfig
from common.errors import UserError
from common.network import host_of, is_this_machine
from common.weights.connection import Connection, ConnectionLost, Stopped, WeightSource
from common.weights.handover import HandedOver, NotHandedOver, shared_folder, take
from common.weights.memory import Transfer, TransferStats
from common.weights.wire import Manifest, life_of, supersedes

RETRY = 0.5  # seconds between attempts to find a server
AVOID = 15.0  # seconds for which a relay that failed is not chosen; twice as long each time it fails again
AVOID_MOST = 600.0

Endpoint = Mapping[str, str]


class Sources:
    """Chooses a server: relays first, without those that failed lately; the learner last.

    Args:
        learner: where the learner serves, as `SnapshotServer.endpoint` returns it; None while that is unknown.
        relay: `auto`: the relays of `relays`; `direct`: none; else the address of the only one.
        relays: those nearby, as `SnapshotServer.endpoint` returns them and with their `name`.

    Attributes:
        newest: the snapshot that the learner served at the last choice; empty if unknown.
    """

    def __init__(
        self,
        learner: Callable[[], Endpoint | None],
        relay: str = "direct",
        relays: Callable[[], Sequence[Endpoint]] = tuple,
    ) -> None:
        self.newest = ""
        self._learner, self._relay, self._relays = learner, relay, relays
        self._avoided: dict[str, float] = {}
        self._failures: dict[str, int] = {}

    def choose(self) -> WeightSource | None:
        """The best source now, if there is one."""
        learner = self._learner()
        self.newest = learner.get("snapshot", "") if learner else ""
        relays = self._candidates(learner)
        good = [relay for relay in relays if self._avoided.get(relay.address, 0.0) <= time.monotonic()]
        if good:
            return good[0]
        if learner:
            return _source(learner)
        return relays[0] if relays else None  # one that failed is better than none

    def failed(self, source: WeightSource) -> None:
        """Prefer others for a while."""
        if source.relay:
            failures = self._failures[source.address] = self._failures.get(source.address, 0) + 1
            self._avoided[source.address] = time.monotonic() + min(AVOID_MOST, AVOID * 2 ** (failures - 1))

    def worked(self, source: WeightSource) -> None:
        """Forget the failures of a source that a snapshot came from."""
        self._failures.pop(source.address, None)
        self._avoided.pop(source.address, None)

    def _candidates(self, learner: Endpoint | None) -> list[WeightSource]:
        if self._relay == "direct":
            return []
        if self._relay == "auto":
            return [_source(near, relay=near["name"]) for near in self._relays()]
        # Without keys the relay is on this machine: find the local server, and its password, by port.
        port = self._relay.rpartition(":")[2]
        here = [one for one in (*self._relays(), learner) if one and one["address"].endswith(f":{port}")]
        password = next((one["password"] for one in here if "password" in one), "")
        return [WeightSource(self._relay, relay=self._relay, configured=True, password=password)]


def _source(endpoint: Endpoint, relay: str = "") -> WeightSource:
    return WeightSource(
        endpoint["address"], endpoint.get("server_key", ""), relay, password=endpoint.get("password", "")
    )


class Receiver(Protocol):
    """Takes snapshots, in the follower's thread."""

    def begin(self, manifest: Manifest) -> Transfer:
        """Choose where the next snapshot is stored; an earlier, incomplete one will not be completed."""

    def arrived(self, chunk: int, delta: memoryview | None) -> None:
        """A verified chunk was written, in any order; `delta` is the delta that it came as, if any."""

    def end(self, transfer: Transfer) -> None:
        """All chunks were written."""

    def take(self, manifest: Manifest, handed: HandedOver, seconds: float) -> None:
        """A verified snapshot lies in another process's memory; close `handed` after use. It took `seconds`."""


class Follower:
    """Fetches each snapshot that is newer than the last one: from shared memory, or chunk by chunk.

    A relay that falls silent, sends wrong chunks or stays behind the learner is avoided for a while. An interrupted
    transfer resumes with the missing chunks, even from another server, because a snapshot has the same name and
    checksums everywhere.

    Args:
        sources: where to pull from; asked before each connection and regularly while waiting.
        receiver: gets the snapshots.
        timeout: seconds of silence, or of staying behind the learner, after which another server is chosen.
        stopped: ends `run`.
        relay_id: id of the relay that this follower belongs to, if any, so that it notices when it follows itself.
    """

    def __init__(
        self,
        sources: Sources,
        receiver: Receiver,
        config: WeightsConfig,
        *,
        timeout: float,
        stopped: threading.Event,
        relay_id: str = "",
        log: Any,
    ) -> None:
        self.stats = TransferStats()
        self.path: list[str] = []  # ids of the relays above, the nearest first
        self._sources, self._receiver, self._config = sources, receiver, config
        self._timeout, self._stopped, self._relay_id, self._log = timeout, stopped, relay_id, log
        self._folder = None if config.deltas == "on" else shared_folder(config)
        self._transfer: Transfer | None = None  # cut off, or under way
        self._have = ""
        self._behind_since: float | None = None
        self._answered: set[str] = set()  # addresses of servers that have answered
        self._logged = ""

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

    def _follow(self, source: WeightSource) -> None:
        """Pull from one server until it fails or there is a better one."""
        mode = self._config.deltas
        # Within a machine, sending a whole snapshot is faster than making and unpacking deltas.
        deltas = mode == "on" or (mode == "auto" and not is_this_machine(host_of(source.address)))
        connection = Connection(source, self._config, self._timeout, self._stopped.is_set, deltas=deltas)
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
        """Wait for a snapshot and fetch it; False if it is time to choose another server."""
        source = connection.source
        manifest = connection.wait_for(
            self._have, lambda offer: self._wants(source, offer), lambda: self._should_leave(connection)
        )
        if manifest is None:
            return False
        self._behind_since = None
        try:
            complete = self._take(connection, manifest)
            self._log_way(source, "through shared memory")
        except NotHandedOver as reason:
            self._log_way(source, f"over the network: {reason}")
            complete = self._fetch(connection, manifest)
        if complete:
            self._have = manifest.snapshot
            self._sources.worked(source)
        else:
            self.stats.restarts += 1
        return True

    def _take(self, connection: Connection, manifest: Manifest) -> bool:
        """Take a snapshot from shared memory; False if its server has dropped it. Raises `NotHandedOver`."""
        began = time.monotonic()
        handed = take(self._folder, connection, manifest)
        if handed is None:
            return False
        wrong = handed.wrong_chunks(manifest)
        if wrong:
            self.stats.corrupt_chunks += wrong
            handed.close()
            raise NotHandedOver(f"{wrong} chunks in shared memory have wrong checksums")
        connection.deltas = False  # the server need not make any for us
        self._transfer = None
        seconds = time.monotonic() - began
        self._count(manifest, seconds)
        self._receiver.take(manifest, handed, seconds)
        return True

    def _fetch(self, connection: Connection, manifest: Manifest) -> bool:
        """Fetch the chunks that are missing; False if the server has dropped the snapshot meanwhile."""
        if self._transfer is None or self._transfer.manifest != manifest:
            self._transfer = self._receiver.begin(manifest)
        transfer, began = self._transfer, time.monotonic()
        try:
            if not connection.fetch(transfer, self.stats, self._receiver.arrived):
                return False
        finally:
            transfer.seconds += time.monotonic() - began
        self._transfer = None
        self._count(manifest, transfer.seconds)
        self._receiver.end(transfer)
        return True

    def _count(self, manifest: Manifest, seconds: float) -> None:
        self.stats.transferred_bytes += manifest.total_bytes
        self.stats.seconds += seconds

    def _log_way(self, source: WeightSource, way: str) -> None:
        if f"{source.address} {way}" != self._logged:
            self._logged = f"{source.address} {way}"
            self._log.info(f"weights come {way}", source=source.address)

    def _wants(self, source: WeightSource, offer: Manifest) -> bool:
        """True for a snapshot newer than ours; a relay may still offer an older one, or an earlier learner's."""
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
        # A server that was started again at the same address has another password.
        if best is not None and (best.address != source.address or best.password not in ("", source.password)):
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
        """Refuse the user's address if something listens there that is not a weight server."""
        source = connection.source
        if not source.configured or source.address in self._answered:
            return
        host, _, port = source.address.removeprefix("tcp://").rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=self._timeout).close()
        except (OSError, UnicodeError):
            return
        raise UserError(
            f"what listens at {source.address} serves no weights, or has other keys: give the address of a learner or "
            "a relay of this run, and the same learner.weights.curve_dir"
        )

    def _choose(self) -> WeightSource | None:
        try:
            return self._sources.choose()
        except UserError:
            raise
        except Exception as error:
            self._log.warning("cannot look up the weights address", reason=str(error))
            return None
