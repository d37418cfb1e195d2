"""Keeps the newest weights at hand: pulls them in a background thread while the engine generates."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from typing import Any

from common.config import WeightsConfig
from common.errors import UserError
from common.log import get_logger
from generator.shared_weights import MemoryPool, SharedWeights
from generator.weight_pull import Connection, ConnectionLost, Stopped, TransferStats

RETRY = 0.5  # seconds between looks for a learner that is not there


class WeightClient:
    """Follows the learner: whatever snapshot it serves that is not the one pulled last is pulled.

    Args:
        endpoint: asked before each connection and regularly while waiting; None while no learner is
            known. When it names another address, the client goes there.
        config: the run's `learner.weights`.
        timeout: seconds of silence in a transfer after which it is begun anew.
    """

    def __init__(
        self,
        endpoint: Callable[[], Mapping[str, str] | None],
        config: WeightsConfig,
        *,
        timeout: float = 10.0,
        log: Any = None,
    ) -> None:
        self.stats = TransferStats()
        self._pool = MemoryPool()
        self._endpoint = endpoint
        self._config = config
        self._timeout = timeout
        self._log = log or get_logger()
        self._have = ""
        self._lock = threading.Lock()  # over the three below
        self._pulled: SharedWeights | None = None
        self._failure: BaseException | None = None
        self._listeners: set[Callable[[], None]] = set()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="weight-client", daemon=True)
        self._thread.start()

    async def next(self) -> SharedWeights:
        """Wait for weights other than the last ones given out. The caller closes them.

        Raises:
            UserError: keys are missing or wrong, or the learner speaks another protocol.
        """
        loop = asyncio.get_running_loop()
        told = asyncio.Event()

        def tell() -> None:
            loop.call_soon_threadsafe(told.set)

        with self._lock:
            self._listeners.add(tell)
        try:
            while (weights := self._take()) is None:
                await told.wait()
                told.clear()
            return weights
        finally:
            with self._lock:
                self._listeners.discard(tell)

    def close(self) -> None:
        """Stop pulling; weights that were pulled and not taken are given back."""
        self._closing.set()
        self._thread.join()
        if self._pulled is not None:
            self._pulled.close()
            self._pulled = None
        self._pool.close()

    def _take(self) -> SharedWeights | None:
        with self._lock:
            if self._failure is not None:
                raise self._failure
            pulled, self._pulled = self._pulled, None
            return pulled

    def _follow(self) -> None:
        connection: Connection | None = None
        try:
            while not self._closing.is_set():
                connection = connection or self._connect()
                if connection is None:
                    self._closing.wait(RETRY)
                    continue
                try:
                    self._pull_next(connection)
                except ConnectionLost as lost:
                    self._log.info("weights connection lost", reason=str(lost))
                    self.stats.reconnects += 1
                    connection.close()
                    connection = None
                    self._closing.wait(RETRY)
        except Stopped:
            pass
        except BaseException as error:
            self._tell(failure=error)
        finally:
            if connection is not None:
                connection.close()

    def _connect(self) -> Connection | None:
        endpoint = self._look_up()
        if endpoint is None:
            return None
        return Connection(endpoint, self._config, self._timeout, self._closing.is_set, self.stats, self._pool)

    def _pull_next(self, connection: Connection) -> None:
        def still_there() -> bool:
            endpoint = self._look_up()
            return endpoint is None or endpoint["address"] == connection.address

        manifest = connection.wait_for_other(self._have, still_there)
        weights = connection.pull(manifest)
        if weights is not None:
            self._have = manifest.snapshot
            self._tell(weights=weights)

    def _look_up(self) -> Mapping[str, str] | None:
        try:
            return self._endpoint()
        except UserError:
            raise
        except Exception as error:
            self._log.warning("cannot look up the weights address", reason=str(error))
            return None

    def _tell(self, weights: SharedWeights | None = None, failure: BaseException | None = None) -> None:
        with self._lock:
            if weights is not None and self._pulled is not None:
                self._pulled.close()
            self._pulled = weights or self._pulled
            self._failure = failure
            for tell in self._listeners:
                tell()
