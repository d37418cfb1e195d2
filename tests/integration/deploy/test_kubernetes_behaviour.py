"""What Kubernetes would do: how many generators its autoscaler wants, and which connections its policies allow."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from common.messages import Batch
from common.streams.batches import BatchInbox
from common.streams.broker import Broker
from common.streams.ledger import Commit, SamplerLedger
from common.streams.tasks import TaskInbox
from tests.support import kubernetes as k8s
from tests.support.streams import dispatch, finished

FULL = 64  # generator.max_concurrency of the component as it is written


def scaler() -> dict[str, Any]:
    (spec,) = (document["spec"] for _, document in k8s.written() if document["kind"] == "ScaledObject")
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
    documents = k8s.rendered("gpu")
    (spec,) = (scaled["spec"] for scaled in k8s.of_kind(documents, "ScaledObject").values())
    config = k8s.configuration("gpu", k8s.environment(k8s.workloads(documents)["generator"], documents))
    streams = {trigger["name"]: trigger["metadata"]["stream"] for trigger in spec["triggers"]}
    # {name} is part of the key: spo:{name}:tasks.
    run = f"spo:{{{config.run.name}}}"
    assert streams == {"tasks": f"{run}:tasks", "batches": f"{run}:batches", "taken": f"{run}:batches"}
    assert int(spec["advanced"]["scalingModifiers"]["target"]) == config.generator.max_concurrency
    assert spec["scaleTargetRef"]["name"] in k8s.of_kind(documents, "Deployment")
    assert "replicas" not in k8s.workloads(documents)["generator"]["spec"], "apply would undo the autoscaler"
    # Beyond this, admission has nothing to hand out.
    outstanding = (config.sampler.max_staleness + 1) * config.sampler.batch_size
    assert spec["maxReplicaCount"] <= math.ceil(outstanding / config.generator.max_concurrency)
    services = k8s.of_kind(documents, "Service")
    for trigger in spec["triggers"]:
        assert trigger["type"] == "redis-streams"
        # Resolved by KEDA, in its own namespace.
        host, _, port = trigger["metadata"]["address"].partition(":")
        assert host.split(".") == ["redis", "spo", "svc"]
        assert int(port) == services["redis"]["spec"]["ports"][0]["port"]
        secret = k8s.of_kind(documents, "TriggerAuthentication")[trigger["authenticationRef"]["name"]]["spec"]
        assert secret["secretTargetRef"] == [{"parameter": "password", "name": "spo-secrets", "key": "redis_password"}]


# The connections that the network policies allow, worked out from the manifests as Kubernetes defines them.

Labels = dict[str, str]
PORTS = (53, 5555, 5556, 6006, 6379, 8000, 8080, 29500)
SPO = {"kubernetes.io/metadata.name": "spo"}
OUTSIDE = {
    "dns": ({"kubernetes.io/metadata.name": "kube-system"}, {"k8s-app": "kube-dns"}),
    "keda": ({"kubernetes.io/metadata.name": "keda"}, {"app": "keda-operator"}),
    "elsewhere": ({"kubernetes.io/metadata.name": "default"}, {}),
}
COMMON = {
    ("sampler", "redis", 6379),
    ("generator", "redis", 6379),
    ("learner", "redis", 6379),
    ("generator", "learner", 5555),
    ("generator", "sandbox", 8080),
    ("sampler", "dns", 53),
    ("generator", "dns", 53),
    ("learner", "dns", 53),
    # Ranks among themselves, on any port.
    *(("learner", "learner", port) for port in PORTS),
}
EXPECTED = {
    "cpu": COMMON,
    "taught": COMMON | {("generator", "teacher", 8000)},
    "gpu": COMMON
    | {
        ("relay", "redis", 6379),
        ("relay", "learner", 5555),
        ("generator", "relay", 5556),
        ("relay", "dns", 53),
        ("keda", "redis", 6379),
    },
}


def selects(selector: k8s.Document, labels: Labels) -> bool:
    """https://kubernetes.io/docs/concepts/overview/working-with-objects/labels; an empty one selects everything."""
    for rule in selector.get("matchExpressions", []):
        assert rule["operator"] == "In"
        if labels.get(rule["key"]) not in rule["values"]:
            return False
    return selector.get("matchLabels", {}).items() <= labels.items()


def admits(rule: k8s.Document, direction: str, peer: tuple[Labels, Labels], port: int) -> bool:
    """Whether a rule lets a peer (labels of its namespace, labels of the pod) through; what it leaves out is any."""
    namespace, labels = peer

    def matches(entry: k8s.Document) -> bool:
        space = entry.get("namespaceSelector", {"matchLabels": SPO})
        return selects(space, namespace) and selects(entry.get("podSelector", {}), labels)

    ports, peers = [entry["port"] for entry in rule.get("ports", [])], rule.get(direction, [])
    return (not ports or port in ports) and (not peers or any(map(matches, peers)))


def allowed(policies: list[Any], way: str, mine: Labels, peer: tuple[Labels, Labels], port: int) -> bool:
    """Whether one end allows it: always without a policy for this direction, else if any of its policies admits it."""
    ours = [policy for policy in policies if way in policy["policyTypes"] and selects(policy["podSelector"], mine)]
    rules = [rule for policy in ours for rule in policy.get(way.lower(), [])]
    return not ours or any(admits(rule, "to" if way == "Egress" else "from", peer, port) for rule in rules)


@pytest.mark.parametrize("overlay", k8s.OVERLAYS)
def test_exactly_these_connections_are_allowed(overlay: str) -> None:
    documents = k8s.rendered(overlay)
    policies = [policy["spec"] for policy in k8s.of_kind(documents, "NetworkPolicy").values()]
    templates = {name: workload["spec"]["template"] for name, workload in k8s.workloads(documents).items()}
    pods = {name: template["metadata"]["labels"] for name, template in templates.items()}
    inside = {name: (SPO, labels) for name, labels in pods.items()}
    peers, connections = inside | OUTSIDE, set()
    for port in PORTS:
        for source, target in itertools.product(peers, peers):
            if source in OUTSIDE and target in OUTSIDE:
                continue
            leaves = source in OUTSIDE or allowed(policies, "Egress", pods[source], peers[target], port)
            enters = target in OUTSIDE or allowed(policies, "Ingress", pods[target], peers[source], port)
            if leaves and enters:
                connections.add((source, target, port))
    assert connections == EXPECTED[overlay]
