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

ROOT = Path(__file__).parents[2]
PACKAGES = ("common", "sampler", "generator", "learner", "relay", "sandbox_client", "launcher")
APPS = (launcher.cli, sampler.cli, generator.cli, learner.cli, relay.cli, sandbox_client.cli)


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Files in a wheel that is built from a copy."""
    copy = tmp_path_factory.mktemp("wheel")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, copy)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", "built", "."]
    subprocess.run(build, cwd=copy, check=True, timeout=300)
    (wheel,) = (copy / "built").glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def test_every_file_of_the_packages_is_in_the_wheel(names: set[str]) -> None:
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.is_file()]
    tracked = {path.relative_to(ROOT).as_posix() for path in files if "__pycache__" not in path.parts}
    assert tracked - names == set()


def helps(command: click.Command, words: str) -> dict[str, str]:
    """What the help of a command and of those below it says, by the words that ask for it."""
    parameters = [getattr(parameter, "help", None) for parameter in command.params]
    texts = {words: "\n".join(filter(None, [command.help, command.epilog, *parameters]))}
    for name, below in getattr(command, "commands", {}).items():
        if not below.hidden:
            texts |= helps(below, f"{words} {name}")
    return texts


def test_help_names_no_file_of_the_repository_that_the_wheel_lacks(names: set[str]) -> None:
    texts = {
        words: text for app in APPS for words, text in helps(typer.main.get_command(app.app), app.__name__).items()
    }
    assert len([text for text in texts.values() if text]) > 20
    there = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name[0] != "."}
    for words, text in texts.items():
        for path in re.findall(r"[\w./-]+/[\w.-]+\.\w+", text):
            assert path.split("/")[0] not in there or path in names, f"{words} --help names {path}"
