"""A run in containers, started by `docker compose` as a user would, with its own names, secrets and volumes."""

from __future__ import annotations

import json
import os
import subprocess
import uuid
from pathlib import Path
from typing import Any

from common.config import BrokerConfig
from common.streams.broker import Broker, connect
from common.streams.steps import StepReader

ROOT = Path(__file__).parents[2]
ROLES = ("redis", "sampler", "generator", "learner", "sandbox")
CONFIG = "/etc/spo/arithmetic.yaml"
IMAGES = {f"SPO_{role.upper()}_IMAGE": f"spo-test-{role}" for role in ROLES}


def sh(*command: str, timeout: float = 1500, **environment: str) -> str:
    """Standard output of a command that must succeed."""
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)} (exit code {done.returncode}):\n{done.stdout}\n{done.stderr}"
    return done.stdout


class Containers:
    """One Compose project; `down` removes everything it made except the images."""

    def __init__(self, secrets: Path, env_file: Path) -> None:
        self.name = f"spo-test-{uuid.uuid4().hex[:8]}"
        self.secrets = secrets
        self.env_file = env_file
        self.environment = {
            "COMPOSE_PROJECT_NAME": self.name,
            "SPO_SECRETS": str(secrets),
            "SPO_ENV_FILE": str(env_file),
            # The build reaches a package registry wherever the host does.
            "SPO_BUILD_NETWORK": os.environ.get("SPO_BUILD_NETWORK", "host"),
            "SPO_TENSORBOARD": "127.0.0.1:",  # any free port
            **IMAGES,
        }

    def compose(self, *words: str, timeout: float = 1500) -> str:
        return sh("docker", "compose", *words, timeout=timeout, **self.environment)

    def build(self) -> None:
        self.compose("build")
        sh("docker/make-secrets", **self.environment)

    def up(self, run: str, *words: str, **settings: Any) -> None:
        """`docker compose up -d` for a run of this name; services that run already are left alone."""
        self.choose(run, **settings)
        self.compose("up", "--detach", "--no-build", *words)

    def choose(self, run: str, **settings: Any) -> None:
        """Set the run's name and its settings for all commands that follow."""
        self.env_file.write_text("".join(f"SPO__{key}={value}\n" for key, value in settings.items()))
        self.environment["SPO_RUN"] = run

    def ids(self, service: str) -> list[str]:
        """Ids of a service's containers, ended ones included."""
        return self.compose("ps", "--all", "--quiet", service).split()

    def inspect(self, container: str) -> dict[str, Any]:
        (description,) = json.loads(sh("docker", "inspect", container))
        return dict(description)

    def exit_codes(self, *services: str) -> dict[str, int]:
        """Wait until the containers of these services have ended, and return their exit codes by name."""
        ids = [container for service in services for container in self.ids(service)]
        sh("docker", "wait", *ids)
        ended = map(self.inspect, ids)
        return {container["Name"]: container["State"]["ExitCode"] for container in ended}

    def kill(self, service: str) -> str:
        """`docker kill` one container of a running service, and return its id."""
        victim = self.compose("ps", "--quiet", service).split()[0]
        sh("docker", "kill", victim)
        return victim

    def broker(self, run: str) -> Broker:
        """The run's Redis, reached from the host though it publishes no port."""
        (container,) = self.ids("redis")
        (network,) = self.inspect(container)["NetworkSettings"]["Networks"].values()
        address = f"redis://{network['IPAddress']}:6379/0"
        return connect(BrokerConfig(url=address, password_file=str(self.secrets / "redis_password")), run)

    def wait_for_step(self, broker: Broker, version: int) -> None:
        reader = StepReader(broker)
        while not any(step.version >= version for step in reader.read(block_ms=1000)):
            pass

    def logs(self) -> str:
        return self.compose("logs", "--no-color", "--tail", "40")

    def down(self) -> None:
        self.compose("down", "--volumes", "--remove-orphans", "--timeout", "10")
