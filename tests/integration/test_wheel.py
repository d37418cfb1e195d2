"""The wheel: it has every file of the packages, and its commands name no file that it does not bring along."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import click
import pytest
import typer

import generator.cli
import launcher.cli
import learner.cli
import relay.cli
import sampler.cli
import sandbox_client.cli
from launcher.tasks import TASKS

ROOT = Path(__file__).parents[2]
APPS = (launcher.cli, sampler.cli, generator.cli, learner.cli, relay.cli, sandbox_client.cli)


def tracked(*paths: str) -> list[str]:
    """Files that git tracks."""
    command = ["git", "ls-files", "-z", "--", *paths]
    files = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    return [name for name in files if name and (ROOT / name).exists()]


def dockerfile_sources() -> list[str]:
    """What the Dockerfile copies from the repository before it builds the wheel."""
    lines = (ROOT / "docker/Dockerfile").read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.endswith(" AS wheel"))
    end = next(i for i, line in enumerate(lines) if "pip wheel" in line)
    copies = [line.split() for line in lines[start:end] if line.startswith("COPY ")]
    return [source for words in copies for source in words[1:-1]]


PACKAGES = tuple(source for source in dockerfile_sources() if (ROOT / source / "__init__.py").exists())


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Files in a wheel that is built as the images build it, from nothing but what the Dockerfile copies."""
    copy = tmp_path_factory.mktemp("wheel")
    for name in tracked(*dockerfile_sources()):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name, follow_symlinks=False)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", "built", "."]
    subprocess.run(build, cwd=copy, check=True, timeout=1500)
    (wheel,) = (copy / "built").glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def test_every_file_of_the_packages_is_in_the_wheel(names: set[str]) -> None:
    assert len(PACKAGES) == 7
    templates = {task.template.relative_to(ROOT).as_posix() for task in TASKS.values()}
    assert {*tracked(*PACKAGES), *templates} - names == set()


def helps(command: click.Command, words: str) -> dict[str, str]:
    """The help of a command and of those below it, by the words that ask for it."""
    parameters = [getattr(parameter, "help", None) for parameter in command.params]
    texts = {words: "\n".join(filter(None, [command.help, command.epilog, *parameters]))}
    for name, below in getattr(command, "commands", {}).items():
        if not below.hidden:
            texts |= helps(below, f"{words} {name}")
    return texts


def test_help_names_no_file_that_the_wheel_lacks(names: set[str]) -> None:
    texts = {
        words: text for app in APPS for words, text in helps(typer.main.get_command(app.app), app.__name__).items()
    }
    assert len([text for text in texts.values() if text]) > 20
    there = {name.split("/")[0] for name in tracked() if "/" in name}
    for words, text in texts.items():
        for path in re.findall(r"[\w./-]+/[\w.-]+\.\w+", text):
            assert path.split("/")[0] not in there or path in names, f"{words} --help names {path}"
