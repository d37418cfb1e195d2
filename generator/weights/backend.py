"""The generator's side of `learner.weights`, by its backend."""

from __future__ import annotations

from common.config import Config
from common.streams.broker import Broker
from common.streams.relays import machine_name, nearby
from generator.engine.engine import Engine
from generator.weights.nccl_client import NcclClient
from generator.weights.weight_client import WeightClient


def weight_client(config: Config, broker: Broker, engine: Engine) -> WeightClient | NcclClient:
    """What keeps the newest weights at hand; to be called in the event loop that the engine runs in."""
    settings = config.learner.weights

    def learner() -> dict[str, str] | None:
        return broker.endpoint("weights")

    if settings.backend == "nccl":
        return NcclClient(learner, settings, engine.workers, engine.join)
    near = machine_name(settings)
    return WeightClient(learner, settings, relays=lambda: nearby(broker, near))
