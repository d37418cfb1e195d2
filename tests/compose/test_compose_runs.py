"""On a real engine, a run of `docker compose up` in which everything is killed ends, and one on a Swarm of one node.

`make test-compose` runs these; they need a Docker engine with Compose that has, or can fetch, the base images.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.streams.broker import Broker
from common.streams.steps import latest
from tests.support.compose import CONFIG, IMAGES, ROOT, Containers, sh
from tests.support.whole_run import settled_counters

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1800)]
ACCURACY = 0.9  # on problems never trained on, after a run that began near 0.13


STEPS = 6  # of the run on a Swarm


@pytest.fixture(scope="session")
def containers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Containers]:
    """Images built from this checkout; all else is gone afterwards."""
    folder = tmp_path_factory.mktemp("compose")
    made = Containers(folder / "secrets", folder / "run.env")
    try:
        made.build()
        yield made
    finally:
        made.down()


@pytest.fixture(autouse=True)
def logs_of_a_failure(containers: Containers, request: pytest.FixtureRequest) -> Iterator[None]:
    failed = request.session.testsfailed
    yield
    if request.session.testsfailed > failed:
        print(containers.logs())


def version(broker: Broker) -> int:
    """The newest version that the learner has announced."""
    step = latest(broker)
    return step.version if step else 0


def generators(broker: Broker) -> list[str]:
    """Names of the generators whose engine runs."""
    processes = broker.processes().items()
    return [name for name, one in processes if (one["role"], one.get("state")) == ("generator", "running")]


def test_a_run_scaled_and_killed_counts_every_task_once(containers: Containers) -> None:
    steps = 90
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


@pytest.fixture
def swarm(containers: Containers) -> Iterator[str]:
    """A Swarm of this machine alone; the name for a stack, which finds the volumes of the Compose project."""
    if sh("docker", "info", "--format", "{{.Swarm.LocalNodeState}}").strip() != "inactive":
        pytest.skip("this engine is part of a swarm already")
    containers.compose("run", "--rm", "prepare")
    containers.compose("down", "--timeout", "10")
    sh("docker", "swarm", "init", "--advertise-addr", "127.0.0.1", "--listen-addr", "127.0.0.1")
    try:
        yield containers.name
    finally:
        sh("docker", "stack", "rm", containers.name)
        # They go one by one; volumes can be removed when no container has them any more.
        label = f"label=com.docker.stack.namespace={containers.name}"
        of_stack = ["docker", "ps", "--all", "--quiet", "--filter", label]
        while left := sh(*of_stack).split():
            subprocess.run(["docker", "wait", *left], capture_output=True, check=False)
        sh("docker", "swarm", "leave", "--force")


def stack_of(containers: Containers) -> tuple[str, str]:
    """The output of `docker/swarm-stack`, and its messages."""
    environment = os.environ | containers.environment
    done = subprocess.run(["docker/swarm-stack"], cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return done.stdout, done.stderr


def test_a_stack_takes_the_run_to_its_end(containers: Containers, swarm: str, tmp_path: Path) -> None:
    containers.choose("stack", RUN__STEPS=STEPS)
    text, messages = stack_of(containers)
    assert "sandbox: left out" in messages
    (tmp_path / "stack.json").write_text(text)
    events = ["docker", "events", "--filter", "event=die", "--format", "{{json .Actor.Attributes}}"]
    ended = subprocess.Popen(events, stdout=subprocess.PIPE, text=True)
    try:
        sh("docker", "stack", "deploy", "--compose-file", str(tmp_path / "stack.json"), swarm)
        waited = {f"{swarm}_{role}" for role in ("sampler", "learner", "generator")}
        assert ended.stdout is not None
        while waited:
            event = json.loads(ended.stdout.readline())
            print("ended:", event.get("com.docker.swarm.service.name"), event.get("exitCode"))
            if event.get("exitCode") == "0":
                waited.discard(event.get("com.docker.swarm.service.name"))
    finally:
        ended.terminate()

    # A container started by hand may join the stack's networks, as the sandbox does.
    secret = f"{containers.secrets / 'redis_password'}:/run/secrets/redis_password:ro"
    environment = json.loads(text)["services"]["generator"]["environment"]
    settings = [word for name, value in environment.items() for word in ("--env", f"{name}={value}")]
    image = IMAGES["SPO_GENERATOR_IMAGE"]
    command = ["docker", "run", "--rm", "--network", f"{swarm}_queue", "--volume", secret, *settings, image]
    report = json.loads(sh(*command, "spo", "status", "--config", CONFIG, "--json"))
    counters, (first, *_, last) = report["counters"], report["evaluations"]
    print("counters", counters)
    assert (report["finished"], report["step"]) == (True, STEPS)
    assert counters["dispatched"] == counters["finished"] == counters["counted"]
    assert (first["version"], last["version"]) == (0, STEPS)
