"""The connections that the network policies allow, worked out from the manifests as Kubernetes defines them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.support.kubernetes import OVERLAYS, Document, of_kind, rendered, workloads

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


def selects(selector: Document, labels: Labels) -> bool:
    """https://kubernetes.io/docs/concepts/overview/working-with-objects/labels; an empty one selects everything."""
    for rule in selector.get("matchExpressions", []):
        assert rule["operator"] == "In"
        if labels.get(rule["key"]) not in rule["values"]:
            return False
    return selector.get("matchLabels", {}).items() <= labels.items()


def admits(rule: Document, direction: str, peer: tuple[Labels, Labels], port: int) -> bool:
    """Whether a rule lets a peer (labels of its namespace, labels of the pod) through; what it leaves out is any."""
    namespace, labels = peer

    def matches(entry: Document) -> bool:
        space = entry.get("namespaceSelector", {"matchLabels": SPO})
        return selects(space, namespace) and selects(entry.get("podSelector", {}), labels)

    ports, peers = [entry["port"] for entry in rule.get("ports", [])], rule.get(direction, [])
    return (not ports or port in ports) and (not peers or any(map(matches, peers)))


def allowed(policies: list[Any], way: str, mine: Labels, peer: tuple[Labels, Labels], port: int) -> bool:
    """Whether one end allows it: always without a policy for this direction, else if any of its policies admits it."""
    ours = [policy for policy in policies if way in policy["policyTypes"] and selects(policy["podSelector"], mine)]
    rules = [rule for policy in ours for rule in policy.get(way.lower(), [])]
    return not ours or any(admits(rule, "to" if way == "Egress" else "from", peer, port) for rule in rules)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_exactly_these_connections_are_allowed(overlay: str) -> None:
    documents = rendered(overlay)
    policies = [policy["spec"] for policy in of_kind(documents, "NetworkPolicy").values()]
    pods = {name: workload["spec"]["template"]["metadata"]["labels"] for name, workload in workloads(documents).items()}
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
