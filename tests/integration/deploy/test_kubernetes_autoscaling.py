"""The number of generators that the autoscaler wants, from what it would read of a real run's streams."""

from __future__ import annotations

import math
from typing import Any

import pytest

from common.messages import Batch
from common.streams.batches import BatchInbox
from common.streams.broker import Broker
from common.streams.ledger import Commit, SamplerLedger
from common.streams.tasks import TaskInbox
from tests.support.kubernetes import configuration, environment, of_kind, rendered, workloads, written
from tests.support.streams import dispatch, finished

FULL = 64  # generator.max_concurrency of the component as it is written


def scaler() -> dict[str, Any]:
    (spec,) = (document["spec"] for _, document in written() if document["kind"] == "ScaledObject")
    return dict(spec)


def metric(broker: Broker, trigger: dict[str, str]) -> int:
    """What KEDA's redis-streams scaler reads: XPENDING of the group where one is named, else XLEN."""
    stream = trigger["stream"].replace("{spo}", f"{{{broker.run}}}")
    if "consumerGroup" in trigger:
        return int(broker.redis.xpending(stream, trigger["consumerGroup"])["pending"])
    return int(broker.redis.xlen(stream))


def wish(broker: Broker) -> int:
    """The number of generators that the horizontal autoscaler would choose: ceil(metric / target)."""
    spec = scaler()
    read = {trigger["name"]: metric(broker, trigger["metadata"]) for trigger in spec["triggers"]}
    modifiers = spec["advanced"]["scalingModifiers"]
    condition, _, rest = modifiers["formula"].partition("?")
    yes, _, no = rest.partition(":")
    value = eval(f"({yes}) if ({condition}) else ({no})", {}, read)
    return max(spec["minReplicaCount"], math.ceil(value / int(modifiers["target"])))


def batch(number: int) -> Batch:
    return Batch(batch_id=number, sample_ids=[f"t{number}"], advantages=[0.0], rewards=[0.0], tokens=[10])


@pytest.mark.integration
def test_generators_are_added_while_the_learner_waits_for_them(real_broker: Broker) -> None:
    ledger = SamplerLedger(real_broker)
    ledger.acquire()
    learner, generator = BatchInbox(real_broker).acquire(), TaskInbox(real_broker, "generator-1")
    assert wish(real_broker) == 1

    dispatch(ledger, 4 * FULL)
    assert wish(real_broker) == 4
    # Leased or waiting: the work is the same.
    leased = generator.take(FULL)
    assert wish(real_broker) == 4
    # Whatever the order of the answers; a task that is given back is work again.
    generator.finish([finished(delivery) for delivery in reversed(leased[FULL // 2 :])])
    generator.requeue(leased[: FULL // 2])
    assert wish(real_broker) == math.ceil(3.5)
    generator.finish([finished(delivery) for delivery in generator.take(FULL)])
    assert wish(real_broker) == math.ceil(2.5)

    # A batch that waits for the learner: more samples would only be older.
    ledger.commit(Commit(batches=[batch(0), batch(1)]))
    assert wish(real_broker) == 1
    assert learner.next(block_ms=100) is not None
    assert wish(real_broker) == 1
    assert learner.next(block_ms=100) is not None
    # The learner works on the last: both are kept until a checkpoint, and neither waits.
    assert wish(real_broker) == math.ceil(2.5)
    assert learner.release_before(2) == 2
    assert wish(real_broker) == math.ceil(2.5)


def test_names_and_sizes_are_the_runs() -> None:
    documents = rendered("gpu")
    (spec,) = (scaled["spec"] for scaled in of_kind(documents, "ScaledObject").values())
    config = configuration("gpu", environment(workloads(documents)["generator"], documents))
    streams = {trigger["name"]: trigger["metadata"]["stream"] for trigger in spec["triggers"]}
    # {name} is part of the key: spo:{name}:tasks.
    run = f"spo:{{{config.run.name}}}"
    assert streams == {"tasks": f"{run}:tasks", "batches": f"{run}:batches", "taken": f"{run}:batches"}
    assert int(spec["advanced"]["scalingModifiers"]["target"]) == config.generator.max_concurrency
    assert spec["scaleTargetRef"]["name"] in of_kind(documents, "Deployment")
    assert "replicas" not in workloads(documents)["generator"]["spec"], "apply would undo the autoscaler"
    # Beyond this, admission has nothing to hand out.
    outstanding = (config.sampler.max_staleness + 1) * config.sampler.batch_size
    assert spec["maxReplicaCount"] <= math.ceil(outstanding / config.generator.max_concurrency)
    services = of_kind(documents, "Service")
    for trigger in spec["triggers"]:
        assert trigger["type"] == "redis-streams"
        # Resolved by KEDA, in its own namespace.
        host, _, port = trigger["metadata"]["address"].partition(":")
        assert host.split(".") == ["redis", "spo", "svc"]
        assert int(port) == services["redis"]["spec"]["ports"][0]["port"]
        secret = of_kind(documents, "TriggerAuthentication")[trigger["authenticationRef"]["name"]]["spec"]
        assert secret["secretTargetRef"] == [{"parameter": "password", "name": "spo-secrets", "key": "redis_password"}]
