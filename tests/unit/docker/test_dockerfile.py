"""What the images are built from: a linted recipe that finds all it copies."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DOCKERFILE = (ROOT / "docker/Dockerfile").read_text(encoding="utf-8")
SENT = set((ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines())


def copied() -> list[str]:
    """Sources of every COPY from this checkout, with the variants of what an argument names."""
    found = []
    for words in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.MULTILINE):
        *sources, _ = [word for word in words.split() if not word.startswith("--")]
        found += [source.replace("${LOCKS}", locks) for source in sources for locks in ("", "-gpu")]
    return sorted(set(found))


@pytest.mark.integration
def test_a_linter_finds_nothing() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run(
        [hadolint, "--no-color", ROOT / "docker/Dockerfile"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.parametrize("source", copied())
def test_what_is_copied_exists_and_is_sent_to_the_engine(source: str) -> None:
    assert (ROOT / source).exists()
    assert {f"!{source}", f"!{source.split('/')[0]}"} & SENT


def test_the_wheel_is_made_of_all_packages() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = {name.rstrip("*") for name in settings["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert packages <= set(copied())


@pytest.mark.parametrize("script", sorted((ROOT / "docker").glob("[a-z]*-*")), ids=lambda path: path.name)
def test_scripts_can_be_run(script: Path) -> None:
    assert script.stat().st_mode & 0o111
