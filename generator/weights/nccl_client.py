"""Weights by NCCL: what is offered and when it is sent goes over the usual socket, the bytes from GPU to GPU.

With each connection the generator's workers meet the learner in a new NCCL group. From then on each snapshot that is
offered is asked for, and handed out when the learner says that it is sending: vLLM's workers receive it while the
engine is paused.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from base64 import b64encode
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Self, TypeVar

from common.config import WeightsConfig
from common.errors import UserError
from common.log import get_logger
from common.weights.pull import Connection, ConnectionLost, Stopped, TransferStats
from common.weights.sources import Endpoint, Sources
from common.weights.wire import Dissolved, Gone, Group, Hello, Join, Manifest, Receive, Refused, Sending

RETRY = 0.5  # seconds between looks for a learner that is not there
PATIENCE = 300.0  # seconds for joining, and for a whole snapshot to arrive
ALIVE = 2.0  # seconds between signs of life while the engine is at work

T = TypeVar("T")


class GroupWeights:
    """A snapshot that the learner is sending.

    Attributes:
        version: weight version.
        patience: seconds within which vLLM must have received it.
    """

    patience: float | None = PATIENCE

    def __init__(self, manifest: Manifest) -> None:
        self.version = manifest.version
        self.manifest = manifest
        self.received = threading.Event()

    def update_info(self) -> dict[str, Any]:
        """vLLM's `NCCLWeightTransferUpdateInfo`."""
        manifest = self.manifest
        return {"names": manifest.names, "dtype_names": manifest.dtypes, "shapes": manifest.shapes}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """The weights are loaded."""
        self.received.set()


class NcclClient:
    """Follows the learner as `WeightClient` does, and has the engine's workers meet it.

    Args:
        endpoint: where the learner serves; None while nobody has said.
        config: the run's `learner.weights`.
        workers: processes of the engine that receive weights.
        join: has them join a group; given vLLM's `NCCLWeightTransferInitInfo`.

    Must be made inside the event loop that `join` runs in.
    """

    def __init__(
        self,
        endpoint: Callable[[], Endpoint | None],
        config: WeightsConfig,
        workers: int,
        join: Callable[[dict[str, Any]], Awaitable[None]],
        *,
        timeout: float = 30.0,
        log: Any = None,
    ) -> None:
        self.stats = TransferStats()
        self._sources, self._config, self._workers, self._join = Sources(endpoint), config, workers, join
        self._timeout, self._log = timeout, log or get_logger()
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Queue[GroupWeights | BaseException] = asyncio.Queue()
        self._have = ""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nccl-client", daemon=True)
        self._thread.start()

    async def next(self) -> GroupWeights:
        """Wait for weights that are being sent. The caller loads and closes them.

        Raises:
            UserError: keys are missing or wrong, or the learner speaks another protocol.
        """
        found = await self._ready.get()
        if isinstance(found, BaseException):
            self._ready.put_nowait(found)
            raise found
        return found

    def close(self) -> None:
        """Leave the group."""
        self._closing.set()
        # The thread may wait for our event loop, which is about to end: it is a daemon.

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                source = self._sources.choose()
                if source is None:
                    self._closing.wait(RETRY)
                    continue
                self.stats.source = "learner"
                connection = _Conversation(source, self._config, self._timeout, self._closing.is_set, self.stats)
                try:
                    self._follow(connection)
                except ConnectionLost as lost:
                    self._log.info("weights connection lost", reason=str(lost), source="learner")
                    self.stats.reconnects += 1
                    self._closing.wait(RETRY)
                finally:
                    connection.close()
        except Stopped:
            return
        except BaseException as error:
            self._tell(error)

    def _follow(self, connection: _Conversation) -> None:
        joined = False
        while True:
            manifest = connection.wait_for(
                self._have, lambda offer: offer.snapshot != self._have, lambda: self._moved(connection)
            )
            if manifest is None:
                return
            if not joined:
                self._meet(connection)
                joined = True
            answer = connection.ask(Receive(snapshot=manifest.snapshot), manifest.snapshot)
            if isinstance(answer, Gone):
                continue
            if isinstance(answer, Dissolved):
                raise ConnectionLost(f"the NCCL group is dissolved: {answer.reason}")
            began = time.monotonic()
            weights = GroupWeights(manifest)
            self._tell(weights)
            while not weights.received.wait(ALIVE):
                connection.ask(Hello())
            self._have = manifest.snapshot
            self.stats.transfers += 1
            self.stats.transferred_bytes += manifest.total_bytes
            self.stats.seconds += time.monotonic() - began

    def _meet(self, connection: _Conversation) -> None:
        """Have the workers meet the learner, which is on its way as soon as it has answered."""
        group = connection.ask(Join(workers=self._workers))
        if not isinstance(group, Group):
            raise ConnectionLost(f"the learner founds no NCCL group: {getattr(group, 'reason', group)}")
        joining = asyncio.run_coroutine_threadsafe(self._joined(init_info(group, self._workers)), self._loop)
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                joining.result(ALIVE)
                return
            except concurrent.futures.TimeoutError:
                if time.monotonic() > deadline:
                    raise UserError(
                        f"the engine's workers have not met the learner in an NCCL group within {PATIENCE:g} s: see "
                        "NCCL_SOCKET_IFNAME and NCCL_DEBUG=INFO, or set learner.weights.backend=zmq"
                    ) from None
                connection.ask(Hello())

    async def _joined(self, info: Mapping[str, Any]) -> None:
        await self._join(dict(info))

    def _moved(self, connection: _Conversation) -> bool:
        best = self._sources.choose()
        return best is not None and best.address != connection.source.address

    def _tell(self, found: GroupWeights | BaseException) -> None:
        self._loop.call_soon_threadsafe(self._ready.put_nowait, found)


class _Conversation(Connection):
    """A connection on which questions are answered one by one."""

    def ask(self, question: Join | Receive | Hello, about: str = "") -> Any:
        """The answer to a question; raises `ConnectionLost` if none comes, `UserError` if it is refused."""
        expected: tuple[type, ...] = {Join: (Group, Dissolved), Receive: (Sending, Gone, Dissolved)}.get(
            type(question), ()
        )
        request: Any = question
        if not self._send(request):
            raise ConnectionLost(f"{self.source.address} is not there")
        asked = time.monotonic()
        while expected:
            reply, _ = self._receive()
            if isinstance(reply, Refused):
                raise UserError(f"the learner at {self.source.address} refuses: {reply.reason}")
            if isinstance(reply, expected) and getattr(reply, "snapshot", about) == about:
                return reply
            if time.monotonic() - asked > self._timeout:
                raise ConnectionLost(f"{self.source.address} has not answered for {self._timeout:g} s")
        return None


def init_info(group: Group, workers: int) -> dict[str, Any]:
    """vLLM's `NCCLWeightTransferInitInfo`: the learner is rank 0, the workers follow."""
    return {
        "rank_offset": 1,
        "world_size": workers + 1,
        "nccl_unique_id_b64": b64encode(group.unique_id).decode(),
        "packed": True,
        "packed_buffer_size_bytes": group.buffer_bytes,
        "packed_num_buffers": 2,
    }
