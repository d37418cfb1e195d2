"""Weights by NCCL: what is offered and when it is sent goes over the usual socket, the bytes from GPU to GPU.

With each connection the generator's workers meet the learner in a new NCCL group. From then on each snapshot that is
offered is asked for, and handed out when the learner says that it is sending: vLLM's workers receive it while the
engine is paused.
"""

from __future__ import annotations

import asyncio
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from typing import Any

from common.errors import UserError
from common.weights.connection import Connection, ConnectionLost
from common.weights.pull import TransferStats
from common.weights.wire import Dissolved, Gone, Group, Hello, Join, Manifest, Receive, Refused, Sending
from generator.weights.hold import Hold

TIMEOUT = 300.0  # seconds for joining, and for a whole snapshot to arrive
HELLO_EVERY = 2.0  # seconds between signs of life while the engine is at work


class NcclWeights(AbstractContextManager[Any]):
    """A snapshot that the learner is sending.

    Attributes:
        version: weight version.
        timeout: seconds within which vLLM must have received it.
    """

    timeout: float | None = TIMEOUT

    def __init__(self, manifest: Manifest) -> None:
        self.version = manifest.version
        self.manifest = manifest
        self.received = threading.Event()

    def update_info(self) -> dict[str, Any]:
        """What `nccl_engine.NcclUpdateInfo` has."""
        manifest = self.manifest
        return {
            "names": manifest.names,
            "dtypes": manifest.dtypes,
            "shapes": manifest.shapes,
            "offsets": manifest.offsets,
            "total_bytes": manifest.total_bytes,
        }

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """The weights are loaded."""
        self.received.set()


class NcclBackend:
    """Has the engine's workers meet the learner and receive each snapshot; a `Backend` of `WeightClient`.

    Args:
        workers: processes of the engine that receive weights.
        join: has them join a group; given vLLM's `NCCLWeightTransferInitInfo`.
        deliver: gets each snapshot when the learner begins to send it.
        hold: while it is held, no snapshot is asked for.

    Must be made inside the event loop that `join` runs in.
    """

    def __init__(
        self,
        workers: int,
        join: Callable[[dict[str, Any]], Coroutine[Any, Any, None]],
        deliver: Callable[[NcclWeights], None],
        hold: Hold | None = None,
    ) -> None:
        self._workers, self._join, self._deliver, self._hold = workers, join, deliver, hold or Hold()
        self._loop = asyncio.get_running_loop()
        self._joined: Connection | None = None  # over which the workers have met the learner

    def pull(self, connection: Connection, manifest: Manifest, stats: TransferStats) -> bool:
        """See `common.weights.follow.Puller`."""
        if connection is not self._joined:
            self._meet(connection)
            self._joined = connection
        _wait_until(self._hold.begin, connection)
        try:
            return self._receive(connection, manifest, stats)
        finally:
            self._hold.end()

    def close(self) -> None:
        """Nothing is held: the group ends with the engine's workers."""

    def _receive(self, connection: Connection, manifest: Manifest, stats: TransferStats) -> bool:
        reply = _ask(connection, Receive(snapshot=manifest.snapshot), Sending, Gone, Dissolved)
        if isinstance(reply, Gone):
            return False
        if isinstance(reply, Dissolved):
            raise ConnectionLost(f"the NCCL group is dissolved: {reply.reason}")
        began = time.monotonic()
        weights = NcclWeights(manifest)
        self._deliver(weights)
        _wait_until(weights.received.is_set, connection)
        stats.transfers += 1
        stats.transferred_bytes += manifest.total_bytes
        stats.seconds += time.monotonic() - began
        return True

    def _meet(self, connection: Connection) -> None:
        """Have the workers meet the learner, which is on its way as soon as it has answered."""
        group = _ask(connection, Join(workers=self._workers), Group, Dissolved)
        if isinstance(group, Dissolved):
            raise ConnectionLost(f"the learner makes no NCCL group: {group.reason}")
        init_info = {  # vLLM's `NCCLWeightTransferInitInfo`: the learner is rank 0
            "rank_offset": 1,
            "world_size": self._workers + 1,
            "nccl_unique_id_b64": b64encode(group.unique_id).decode(),
            "packed_buffer_size_bytes": group.buffer_bytes,
        }
        joining = asyncio.run_coroutine_threadsafe(self._join(init_info), self._loop)
        if not _wait_until(joining.done, connection, TIMEOUT):
            raise UserError(
                f"the engine's workers have not met the learner in an NCCL group within {TIMEOUT:g} s: see "
                "NCCL_SOCKET_IFNAME and NCCL_DEBUG=INFO, or set learner.weights.backend=zmq"
            )
        joining.result()


def _ask(connection: Connection, request: Join | Receive, *replies: type) -> Any:
    """The reply to a request, of one of these types.

    Raises:
        ConnectionLost: none comes.
        UserError: the request is refused.
    """
    address, snapshot = connection.source.address, getattr(request, "snapshot", None)
    if not connection.send(request):
        raise ConnectionLost(f"{address} is not there")
    asked = time.monotonic()
    while True:
        reply, _ = connection.receive()
        if isinstance(reply, Refused):
            raise UserError(f"the learner at {address} refuses: {reply.reason}")
        if isinstance(reply, replies) and getattr(reply, "snapshot", snapshot) == snapshot:
            return reply
        if time.monotonic() - asked > connection.timeout:
            raise ConnectionLost(f"{address} has not answered for {connection.timeout:g} s")


def _wait_until(is_done: Callable[[], bool], connection: Connection, timeout: float = float("inf")) -> bool:
    """Wait for the engine, telling the learner meanwhile that this generator lives; False after `timeout` seconds."""
    began = greeted = time.monotonic()
    while not is_done():
        connection.receive()  # returns after a tick, and ends the wait when the client is closed
        now = time.monotonic()
        if now - began > timeout:
            return False
        if now - greeted > HELLO_EVERY:
            greeted = now
            if not connection.send(Hello()):
                raise ConnectionLost(f"{connection.source.address} is not there")
    return True
