"""Keeps the newest weights ready: a background thread follows the learner while the engine generates."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

from common.config import WeightsConfig
from common.log import get_logger
from common.weights.delta import same_layout
from common.weights.follow import Endpoint, Follower, Sources
from common.weights.handover import HandedOver
from common.weights.memory import MemoryFile, Transfer
from common.weights.wire import Manifest
from generator.weights.shared_weights import MemoryPool, SharedWeights


class WeightClient:
    """Follows the learner, through a nearby relay if there is one; it is the follower's `Receiver`.

    Args:
        endpoint: returns where the learner serves, None while no learner is known. Called before each connection and
            regularly while waiting; when it returns another address, the client connects there.
        config: the run's `learner.weights`.
        relays: returns the nearby relays; called as often.
        timeout: seconds of silence in a transfer after which the client gives up on its server.
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
        self._lock = threading.Lock()  # guards the four below
        self._held = False
        self._weights: SharedWeights | None = None
        self._error: BaseException | None = None
        self._waiters: set[Callable[[], None]] = set()
        # Used by the thread.
        self._pool = MemoryPool()
        self._arriving: MemoryFile | None = None
        self._last: tuple[Manifest, MemoryFile] | None = None  # complete: the base of the next deltas
        self._closing = threading.Event()
        sources, log = Sources(endpoint, config.relay, relays), log or get_logger()
        self._follower = Follower(sources, self, config, timeout=timeout, stopped=self._closing, log=log)
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
            while (weights := self._pop()) is None:
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
        """Stop pulling, and free weights that nothing has taken."""
        self._closing.set()
        self._thread.join()
        if self._weights is not None:
            self._weights.close()
            self._weights = None
        self._forget_arriving()
        self._forget_last()
        self._pool.close()

    def begin(self, manifest: Manifest) -> Transfer:
        """Make room for arriving weights: in place, if they are deltas to the last weights and those are loaded."""
        self._forget_arriving()
        base = None
        if self._last is not None:
            before, file = self._last
            if before.snapshot == manifest.base and same_layout(before, manifest):
                base = file
            else:
                self._forget_last()
        if base is not None and self._pool.users(base) == 1:  # only `_last` uses it: the engine has loaded it
            self._last = None
            self._arriving = base
        else:
            self._arriving = self._pool.take(manifest.total_bytes)
        return Transfer(manifest, self._arriving, base)

    def arrived(self, chunk: int, delta: memoryview | None) -> None:
        """Do nothing: only whole transfers matter here."""

    def end(self, transfer: Transfer) -> None:
        """Give the weights out, and keep them as the base of the next deltas."""
        self._arriving = None
        self._forget_last()
        self._pool.share(transfer.file)
        self._last = transfer.manifest, transfer.file
        self._give_out(SharedWeights(transfer.manifest, transfer.file, transfer.seconds, self._pool.give_back))

    def take(self, manifest: Manifest, handed: HandedOver, seconds: float) -> None:
        """Give out weights that lie in another process's memory."""
        self._forget_arriving()
        self._forget_last()
        self._give_out(SharedWeights(manifest, handed.file, seconds, lambda file: handed.close()))

    def _forget_arriving(self) -> None:
        file, self._arriving = self._arriving, None
        if file is not None:
            self._pool.give_back(file)

    def _forget_last(self) -> None:
        last, self._last = self._last, None
        if last is not None:
            self._pool.give_back(last[1])

    def _follow(self) -> None:
        try:
            self._follower.run()
        except BaseException as error:
            with self._lock:
                self._error = error
                self._notify()

    def _give_out(self, weights: SharedWeights) -> None:
        """Have `next` return the weights instead of older ones that it has not returned yet."""
        with self._lock:
            if self._weights is not None:
                self._weights.close()
            self._weights = weights
            self._notify()

    def _pop(self) -> SharedWeights | None:
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._held:
                return None
            weights, self._weights = self._weights, None
            return weights

    def _notify(self) -> None:
        for notify in self._waiters:
            notify()
