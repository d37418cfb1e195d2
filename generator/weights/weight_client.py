"""Keeps the newest weights at hand: pulls them in a background thread while the engine generates."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

from common.config import WeightsConfig
from common.log import get_logger
from common.weights.follow import Follower
from common.weights.sources import Endpoint, Sources
from common.weights.wire import Manifest
from generator.weights.shared_weights import MemoryPool, SharedWeights


class WeightClient:
    """Follows the learner, through a relay where there is one nearby.

    Args:
        endpoint: where the learner serves, asked before each connection and regularly while waiting; None while no
            learner is known. When it names another address, the client goes there.
        config: the run's `learner.weights`.
        relays: those nearby; asked as often.
        timeout: seconds of silence in a transfer after which its server is given up.
    """

    def __init__(
        self,
        endpoint: Callable[[], Endpoint | None],
        config: WeightsConfig,
        *,
        relays: Callable[[], Sequence[Endpoint]] = tuple,
        timeout: float = 10.0,
        log: Any = None,
    ) -> None:
        self._pool = MemoryPool()
        self._arriving: SharedWeights | None = None  # the thread's own
        self._lock = threading.Lock()  # over the three below
        self._pulled: SharedWeights | None = None
        self._failure: BaseException | None = None
        self._listeners: set[Callable[[], None]] = set()
        self._closing = threading.Event()
        self._follower = Follower(
            Sources(endpoint, config.relay, relays),
            config,
            self,
            timeout=timeout,
            stopped=self._closing,
            log=log or get_logger(),
        )
        self.stats = self._follower.stats
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

    def begin(self, manifest: Manifest) -> None:
        """Make room for weights on their way."""
        self._drop_arriving()
        self._arriving = SharedWeights(manifest, self._pool.take(manifest.total_bytes), self._pool.give_back)

    def chunk(self, index: int, data: memoryview) -> None:
        """Put a chunk in its place."""
        assert self._arriving is not None
        self._arriving.write(self._arriving.manifest.chunk_range(index)[0], data)

    def end(self, seconds: float) -> None:
        """Give the weights out."""
        assert self._arriving is not None
        weights, self._arriving = self._arriving, None
        weights.seconds = seconds
        self._tell(weights=weights)

    def _take(self) -> SharedWeights | None:
        with self._lock:
            if self._failure is not None:
                raise self._failure
            pulled, self._pulled = self._pulled, None
            return pulled

    def _follow(self) -> None:
        try:
            self._follower.run()
        except BaseException as error:
            self._tell(failure=error)
        finally:
            self._drop_arriving()

    def _drop_arriving(self) -> None:
        if self._arriving is not None:
            self._arriving.close()
            self._arriving = None

    def _tell(self, weights: SharedWeights | None = None, failure: BaseException | None = None) -> None:
        with self._lock:
            if weights is not None and self._pulled is not None:
                self._pulled.close()
            self._pulled = weights or self._pulled
            self._failure = failure
            for tell in self._listeners:
                tell()
