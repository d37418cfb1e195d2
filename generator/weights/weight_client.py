"""Keeps the newest weights at hand: a background thread follows the learner while the engine generates."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

from common.config import WeightsConfig
from common.log import get_logger
from common.weights.follow import Follower
from common.weights.sources import Endpoint, Sources
from generator.weights.shared_weights import SharedMemoryBackend, SharedWeights


class WeightClient:
    """Follows the learner, through a relay where there is one nearby.

    Args:
        endpoint: where the learner serves, asked before each connection and regularly while waiting; None while no
            learner is known. When it names another address, the client goes there.
        config: the run's `learner.weights`.
        relays: those nearby; asked as often.
        backend: makes what pulls the weights, given the function that takes them.
        timeout: seconds of silence in a transfer after which its server is given up.
    """

    def __init__(
        self,
        endpoint: Callable[[], Endpoint | None],
        config: WeightsConfig,
        *,
        relays: Callable[[], Sequence[Endpoint]] = tuple,
        backend: Callable[[Callable[[Any], None]], SharedMemoryBackend] | None = None,
        timeout: float = 10.0,
        log: Any = None,
    ) -> None:
        self._lock = threading.Lock()  # over the four below
        self._held = False
        self._weights: SharedWeights | None = None
        self._error: BaseException | None = None
        self._waiters: set[Callable[[], None]] = set()
        self._closing = threading.Event()
        log = log or get_logger()
        make_backend = backend or (lambda deliver: SharedMemoryBackend(deliver, config, log))
        self._backend = make_backend(lambda weights: self._hand_out(weights=weights))
        self._follower = Follower(
            Sources(endpoint, config.relay, relays),
            self._backend,
            config.curve_dir,
            timeout=timeout,
            stopped=self._closing,
            deltas=config.deltas,
            log=log,
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
        changed = asyncio.Event()

        def notify() -> None:
            loop.call_soon_threadsafe(changed.set)

        with self._lock:
            self._waiters.add(notify)
        try:
            while (weights := self._take()) is None:
                await changed.wait()
                changed.clear()
            return weights
        finally:
            with self._lock:
                self._waiters.discard(notify)

    def hold(self) -> None:
        """Give out no weights until `release`."""
        with self._lock:
            self._held = True

    def release(self) -> None:
        """Give out the newest weights again."""
        with self._lock:
            self._held = False
            self._notify()

    def close(self) -> None:
        """Stop pulling; weights that were pulled and not taken are given back."""
        self._closing.set()
        self._thread.join()
        if self._weights is not None:
            self._weights.close()
            self._weights = None
        self._backend.close()

    def _take(self) -> SharedWeights | None:
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._held:
                return None
            weights, self._weights = self._weights, None
            return weights

    def _follow(self) -> None:
        try:
            self._follower.run()
        except BaseException as error:
            self._hand_out(error=error)

    def _hand_out(self, weights: SharedWeights | None = None, error: BaseException | None = None) -> None:
        """Have `next` return the weights or raise the error; weights that nobody has taken are replaced."""
        with self._lock:
            if weights is not None and self._weights is not None:
                self._weights.close()
            self._weights = weights or self._weights
            self._error = error
            self._notify()

    def _notify(self) -> None:
        for notify in self._waiters:
            notify()
