"""`docker compose up` on a real engine: a run in which everything is killed comes to its end.

`make test-compose` runs these; they need a Docker engine with Compose that has, or can fetch, the base images.
"""

from __future__ import annotations

import json

import pytest

from common.streams.broker import Broker
from common.streams.steps import latest
from tests.support.compose import CONFIG, Containers, sh
from tests.support.whole_run import settled_counters

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1800)]
ACCURACY = 0.9  # on problems never trained on, after a run that began near 0.13


def version(broker: Broker) -> int:
    """The newest version that the learner has announced."""
    step = latest(broker)
    return step.version if step else 0


def generators(broker: Broker) -> list[str]:
    """Names of the generators whose engine runs."""
    processes = broker.processes().items()
    return [name for name, one in processes if (one["role"], one.get("state")) == ("generator", "running")]


def test_a_run_scaled_and_killed_counts_every_task_once(containers: Containers) -> None:
    steps = 120
    containers.up("first", RUN__STEPS=steps)
    broker = containers.broker("first")
    containers.wait_for_step(broker, 2)

    def up() -> None:
        containers.up("first", "--no-recreate", "--scale", "generator=2", RUN__STEPS=steps)

    up()
    while len(generators(broker)) < 2:
        containers.wait_for_step(broker, version(broker) + 1)
    helped = generators(broker)

    # Docker does not start a container again after `docker kill`; the same `up` does.
    for service in ("generator", "learner", "sampler", "redis"):
        victim = containers.kill(service)
        if service == "generator":
            # The other goes on alone meanwhile.
            containers.wait_for_step(broker, version(broker) + 2)
            assert not containers.inspect(victim)["State"]["Running"]
        up()
        broker = containers.broker("first")
        containers.wait_for_step(broker, version(broker) + 2)

    # A crash is another matter: the restart policy alone brings this one back.
    crashed = containers.compose("ps", "--quiet", "generator").split()[0]
    sh("docker", "exec", crashed, "sh", "-c", "kill -9 $(cat /proc/1/task/1/children)")

    assert set(containers.exit_codes("sampler", "learner", "generator").values()) == {0}
    assert containers.inspect(crashed)["RestartCount"] >= 1
    counters = settled_counters(broker)
    before, *_, after = broker.evaluations()
    print("counters", counters, "generators", helped, "accuracy", before["accuracy"], after["accuracy"])
    assert (before["version"], after["version"]) == (0, steps)
    assert after["accuracy"] > ACCURACY > before["accuracy"]
    # The processes' own report, asked for as a user does.
    status = ("spo", "status", "--config", CONFIG, "--json")
    report = json.loads(containers.compose("run", "--rm", "--no-deps", "generator", *status))
    assert (report["finished"], report["step"], report["counters"]) == (True, steps, counters)


def test_secrets_and_ports_stay_inside(containers: Containers) -> None:
    """Only the container of TensorBoard is published, on loopback; no secret is in an environment."""
    passwords = [path.read_text() for path in containers.secrets.iterdir() if path.name != "client.key"]
    for container in containers.compose("ps", "--all", "--quiet").split():
        details = containers.inspect(container)
        published = [binding for ports in details["HostConfig"]["PortBindings"].values() for binding in ports]
        assert all(binding["HostIp"] == "127.0.0.1" for binding in published)
        assert bool(published) == ("tensorboard" in details["Name"])
        assert details["Config"]["User"] not in {"", "root", "0"}
        assert details["HostConfig"]["ReadonlyRootfs"]
        text = json.dumps([details["Config"], details["Args"]])
        assert not any(password in text for password in passwords)
