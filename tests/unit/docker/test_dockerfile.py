"""The Dockerfile passes a linter, and everything that it copies exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DOCKERFILE = (ROOT / "docker/Dockerfile").read_text(encoding="utf-8")


@pytest.mark.integration
def test_a_linter_finds_nothing() -> None:
    command = [Path(sys.executable).with_name("hadolint"), "--no-color", ROOT / "docker/Dockerfile"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_what_is_copied_exists_and_is_sent_to_the_engine() -> None:
    sent = set((ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines())
    for words in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.MULTILINE):
        *sources, _ = [word for word in words.split() if not word.startswith("--")]
        for source in (source.replace("${LOCKS}", locks) for source in sources for locks in ("", "-gpu")):
            assert (ROOT / source).exists(), source
            assert {f"!{source}", f"!{source.split('/')[0]}"} & sent, source


def test_scripts_can_be_run() -> None:
    scripts = list((ROOT / "docker").glob("[a-z]*-*"))
    assert scripts
    assert [script.name for script in scripts if not script.stat().st_mode & 0o111] == []
