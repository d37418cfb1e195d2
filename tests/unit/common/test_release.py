"""The release that all processes of a run must have: two checkouts of one version differ by their code."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

import pytest

from common.release import code_digest, release

FILES = {"common/a.py": "x = 1\n", "common/streams/a.lua": "return 1\n", "learner/b.py": "y = 2\n"}


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


@pytest.mark.parametrize(
    ("changed", "same"),
    [
        ({}, True),
        ({"common/__pycache__/a.cpython-311.pyc": "compiled", "launcher/c.py": "z", "tests/d.py": "z"}, True),
        ({"common/streams/a.lua": "return 2\n"}, False),
        ({"learner/b.py": "", "learner/c.py": "y = 2\n"}, False),
    ],
    ids=["as it is", "other files", "script", "moved"],
)
def test_the_digest_is_of_the_code(changed: dict[str, str], same: bool, tmp_path: Path) -> None:
    here, there = tree(tmp_path / "here", FILES), tree(tmp_path / "there" / "site-packages", FILES | changed)
    assert (code_digest(here) == code_digest(there)) is same


def test_a_release_names_version_and_code() -> None:
    assert re.fullmatch(rf"{re.escape(version('spo-trainer'))}\+[0-9a-f]{{8}}", release())
