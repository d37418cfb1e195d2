"""The objects that a generator works with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from common.streams.broker import Broker
from common.streams.presence import Presence
from common.streams.tasks import TaskInbox
from generator.agents.endpoint import Endpoint
from generator.engine.engine import Engine
from generator.episode.parts import RunParts
from generator.metrics import GeneratorMetrics
from generator.teacher.server import TeacherServer
from generator.weights.weight_client import WeightClient


@dataclass(frozen=True)
class Services:
    """The objects of one generator, made by `spo-generator`.

    Attributes:
        weights: None in a run without a learner.
        endpoint: None if no source has an agent.
        teachers: the servers of teachers, by their names in `Config.teachers_in_use`.
    """

    broker: Broker
    inbox: TaskInbox
    presence: Presence
    engine: Engine
    weights: WeightClient | None
    parts: RunParts
    metrics: GeneratorMetrics
    log: Any
    endpoint: Endpoint | None = None
    teachers: Mapping[str, TeacherServer] = field(default_factory=dict)
