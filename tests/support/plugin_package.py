"""An installed package that announces a tool, a user and a reward, made of a module and its metadata."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

MODULE = '''
class Ruler:
    """A tool that measures."""

    name = "ruler"
    description = "Counts the letters of a word."
    schema = {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}

    def __init__(self, unit: str = "letters"):
        self.unit = unit

    async def call(self, word):
        return f"{len(word)} {self.unit}"


class Nodding:
    """A user who agrees with everything."""

    def __init__(self, word: str = "Yes."):
        self.word = word

    async def start(self, episode_id, **_):
        pass

    async def respond(self, episode_id, messages):
        return False, self.word, 0.0, {}

    async def finish(self, episode_id):
        pass


def brevity(text, answer, row, most: int = 10):
    return max(0.0, 1 - len(text) / most)
'''
ENTRY_POINTS = {
    "spo.tools": {"ruler": "measuring:Ruler"},
    "spo.users": {"nodding": "measuring:Nodding"},
    "spo.rewards": {"brevity": "measuring:brevity"},
}
Points = Mapping[str, Mapping[str, str]]


def install(folder: Path, patch: pytest.MonkeyPatch, points: Points = ENTRY_POINTS, package: str = "measuring") -> None:
    """Put the package where Python finds it, until the test is over."""
    announce(folder, patch, points, package)
    (folder / "measuring.py").write_text(MODULE)


def announce(folder: Path, patch: pytest.MonkeyPatch, points: Points, package: str = "announced") -> None:
    """The metadata of a package with these entry points, {group: {name: object}}."""
    metadata = folder / f"{package}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points[group].items()) for group in points
    ]
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    patch.syspath_prepend(folder)
