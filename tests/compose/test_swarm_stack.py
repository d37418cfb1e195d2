"""The same run, shorter, as a stack of a Swarm of one node."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.compose import CONFIG, IMAGES, ROOT, Containers, sh

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1800)]
STEPS = 6


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
    done = subprocess.run(
        ["docker/swarm-stack"],
        cwd=ROOT,
        env=os.environ | containers.environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout, done.stderr


def test_a_stack_takes_the_run_to_its_end(containers: Containers, swarm: str, tmp_path: Path) -> None:
    containers.choose("stack", RUN__STEPS=STEPS)
    text, messages = stack_of(containers)
    assert "sandbox: left out" in messages
    (tmp_path / "stack.json").write_text(text)
    ended = subprocess.Popen(
        ["docker", "events", "--filter", "event=die", "--format", "{{json .Actor.Attributes}}"],
        stdout=subprocess.PIPE,
        text=True,
    )
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
