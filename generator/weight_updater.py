"""Loads the newest weights into the engine while it generates."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from common.config import Config, LoraConfig
from common.process import in_thread
from generator.engine.engine import Engine
from generator.services import Services
from generator.weights.adapter import AdapterFolder, check_adapter
from generator.weights.logprob_check import LogprobCheck
from generator.weights.shared_weights import SharedWeights
from generator.weights.weight_client import WeightClient


class WeightUpdater:
    """Follows the learner's versions, if there is a learner; for one event loop."""

    def __init__(self, config: Config, services: Services) -> None:
        self.services = services
        self.logprob_check = LogprobCheck(services.engine, config, services.log)
        self.version_changed = asyncio.Condition()
        self._loading = False
        self._is_kept = config.run.deterministic
        self._lora = config.learner.lora

    @property
    def version(self) -> int:
        return self.services.engine.version

    def hold(self) -> bool:
        """Keep the engine's version until `release`; returns False if another version is being loaded."""
        if self._loading:
            return False
        if self.services.weights is not None:
            self.services.weights.hold()
        return True

    def release(self) -> None:
        if self.services.weights is not None:
            self.services.weights.release()

    async def load_first(self) -> bool:
        """Wait until the learner serves weights and load them; False if the run finishes before that.

        Without a learner the engine keeps the model from disk, which is version 0.
        """
        services, timeout = self.services, 0.5
        if services.weights is None:
            return True
        while True:
            try:
                await self._load(services.weights, await asyncio.wait_for(services.weights.next(), timeout))
                return True
            except TimeoutError:
                timeout = 5.0
            services.log.info("waiting for the learner's weights")
            services.presence.status(state="waiting for weights")
            if await in_thread(services.broker.finished):
                return False

    async def follow(self) -> None:
        """Load each new version, until cancelled."""
        client = self.services.weights
        while client is not None:
            weights = await client.next()
            # No await since `next` has ended, so no evaluation can have held the version in between.
            self._loading = True
            try:
                await self._load(client, weights)
            finally:
                self._loading = False

    @contextlib.asynccontextmanager
    async def at_least(self, version: int) -> AsyncIterator[None]:
        """Wait until the engine has this version or a newer one.

        In a deterministic run, no other episode runs and no weights are loaded within the block.
        """
        async with self.version_changed:
            await self.version_changed.wait_for(lambda: self.version >= version)
            if self._is_kept:
                yield
                return
        yield

    async def _load(self, client: WeightClient, weights: SharedWeights) -> None:
        """Put pulled weights into the engine: the only time generation pauses."""
        services, timeline = self.services, self.services.metrics.timeline
        pulled = client.stats.seconds - services.metrics.pull_seconds
        # The pull ended a moment ago, or earlier if the weights were held back for an evaluation.
        timeline.slice("pull", time.time() - pulled, lane="pulls", version=weights.version)
        async with self.version_changed:
            with contextlib.closing(weights), timeline.span("load", lane="loads", version=weights.version):
                pause = await load_weights(services.engine, weights, self._lora)
            await self.logprob_check.after_update(weights.manifest)
            self.version_changed.notify_all()
        stats = client.stats
        services.metrics.updated(pulled=stats.seconds, pause=pause)
        services.log.debug("weights", version=weights.version, pause=pause)
        services.presence.status(version=weights.version, source=stats.source)


async def load_weights(engine: Engine, weights: SharedWeights, lora: LoraConfig | None) -> float:
    """Load weights into the engine; they may be closed afterwards. `lora` is the run's `learner.lora`.

    Returns:
        Seconds during which it generated nothing.

    Raises:
        EngineDied: they do not fit the model.
        UserError: `lora` is set, and they are not an adapter of its rank.
    """
    if lora is not None:
        check_adapter(weights.manifest, lora)
        if lora.serve != "merged":
            return await engine.load_adapter(AdapterFolder(weights, lora))
        weights.lora_scaling = lora.scaling
    return await engine.load(weights.version, weights)
