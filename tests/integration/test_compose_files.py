"""Docker Compose itself reads compose.yaml with compose.gpu.yaml on top; this needs no engine."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def compose(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    command = ["docker", "compose", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def _compose() -> None:
    if not shutil.which("docker"):
        pytest.skip("there is no docker client")
    if compose("version").returncode != 0:
        pytest.skip("docker has no Compose plugin")


@pytest.mark.usefixtures("_compose")
@pytest.mark.parametrize("env_file", ["/dev/null", ".env.gpu.example", ".env.example"])
def test_compose_takes_the_files_without_a_warning(env_file: str) -> None:
    files = ("-f", "compose.yaml", "-f", "compose.gpu.yaml")
    ran = compose("--env-file", env_file, "--profile", "*", *files, "config", "--quiet")
    assert (ran.returncode, ran.stderr) == (0, "")
