"""Small makers of messages for stream tests."""

from __future__ import annotations

import numpy as np

from common.messages import SampleHeader, Task
from common.payload import Payload
from common.streams.ledger import Commit, SamplerLedger
from common.streams.tasks import Delivery, Finished


def tasks(n: int, start: int = 0) -> list[Task]:
    return [Task(task_id=f"t{i}", prompt_id=f"p{i}", prompt=f"prompt {i}") for i in range(start, start + n)]


def dispatch(ledger: SamplerLedger, n: int, start: int = 0) -> None:
    ledger.commit(Commit(dispatch=[(task, b"memo") for task in tasks(n, start)]))


def payload(tokens: int = 10, prompt: int = 4, version: int = 0) -> Payload:
    sampled = tokens - prompt
    return Payload(
        np.arange(tokens, dtype=np.int32),
        np.array([[prompt, tokens]], np.int32),
        np.linspace(-1, 0, sampled, dtype=np.float32),
        np.array([[version, 0, sampled]], np.int32),
    )


def finished(delivery: Delivery, reward: float = 1.0, **changes: object) -> Finished:
    task = delivery.task
    header = SampleHeader(task_id=task.task_id, prompt_id=task.prompt_id, reward=reward, tokens=10, model_tokens=6)
    return Finished(delivery.entry_id, header.model_copy(update=changes), payload())
