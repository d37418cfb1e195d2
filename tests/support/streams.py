"""Small makers of messages for stream tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from common.config import BrokerConfig
from common.errors import UserError
from common.messages import SampleHeader, Task
from common.payload import Payload
from common.streams.broker import Broker, connect
from common.streams.ledger import Commit, SamplerLedger
from common.streams.tasks import CONSUMER_GROUP, HOLDERS, TRAINING, Delivery, Finished, TaskInbox


def tasks(n: int, start: int = 0) -> list[Task]:
    return [Task(task_id=f"t{i}", prompt_id=f"p{i}", prompt=f"prompt {i}") for i in range(start, start + n)]


def dispatch(ledger: SamplerLedger, n: int, start: int = 0) -> None:
    ledger.commit(Commit(dispatch=[(task, b"memo") for task in tasks(n, start)]))


def evaluate(ledger: SamplerLedger, n: int = 1, version: int = 0) -> None:
    """Begin the evaluation e0, of n tasks, for this version or a newer one."""
    asked = [Task(task_id=f"e0-{i}", prompt_id=f"h{i}", prompt="?", kind="eval", evaluation="e0") for i in range(n)]
    evaluation = Commit(dispatch=[(task, b"memo") for task in asked])
    evaluation.scalars |= {"evaluating": "e0", "evaluating_from": version}
    ledger.commit(evaluation)


def leased(ledger: SamplerLedger, n: int, name: str = "a") -> tuple[TaskInbox, list[Delivery]]:
    dispatch(ledger, n)
    inbox = TaskInbox(ledger.broker, name)
    return inbox, inbox.take(n, 0)


def finish_all(ledger: SamplerLedger, n: int) -> TaskInbox:
    inbox, deliveries = leased(ledger, n)
    inbox.finish([finished(delivery) for delivery in deliveries])
    return inbox


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


def silence(broker: Broker, inbox: TaskInbox, seconds: float = 120.0) -> None:
    broker.redis.zincrby(broker.key(HOLDERS), -1000 * seconds, inbox.consumer)


def lose_reply(broker: Broker, inbox: TaskInbox, seconds: float = 120.0) -> None:
    """Lease one task, `seconds` ago, to a process that never learns of it."""
    consumer = inbox.consumer
    ((entry_id, _),) = broker.read_group(TRAINING, CONSUMER_GROUP, consumer, count=1)
    idle = int(1000 * seconds)
    broker.redis.xclaim(broker.key(TRAINING), CONSUMER_GROUP, consumer, 0, [entry_id], idle=idle, justid=True)


def refusal(url: str, wait: float = 0, **settings: Any) -> str:
    """The line that says why Redis cannot be used at this address."""
    with pytest.raises(UserError) as refused:
        connect(BrokerConfig(url=url, wait=wait, **settings), "run")
    assert "\n" not in str(refused.value)
    return str(refused.value)


def saved_keys(broker: Broker) -> dict[bytes, bytes]:
    """All that Redis holds, for `put_back`: as a backup, or an older log."""
    return {name: broker.redis.dump(name) for name in broker.redis.keys("*")}


def put_back(broker: Broker, keys: dict[bytes, bytes]) -> None:
    """Put all keys back at once: Redis answers no process before it has read its log, so none may see it empty."""
    with broker.redis.pipeline(transaction=True) as pipe:
        pipe.flushall()
        for name, value in keys.items():
            pipe.restore(name, 0, value)
        pipe.execute()
