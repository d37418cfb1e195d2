"""An installed package that announces a tool, a user and a reward, made of a module and its metadata."""

from __future__ import annotations

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
ENTRY_POINTS = """
[spo.tools]
ruler = measuring:Ruler

[spo.users]
nodding = measuring:Nodding

[spo.rewards]
brevity = measuring:brevity
"""


def install(folder: Path, patch: pytest.MonkeyPatch, points: str = ENTRY_POINTS, package: str = "measuring") -> None:
    """Put the package where Python finds it, until the test is over."""
    metadata = folder / f"{package}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(points)
    (folder / "measuring.py").write_text(MODULE)
    patch.syspath_prepend(folder)
