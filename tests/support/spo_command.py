"""The command `spo`, run in this process, on a terminal or without one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest
from typer.testing import CliRunner

from launcher.cli import app, main


class Ran(NamedTuple):
    """The output of a command, and its exit code."""

    returncode: int
    stdout: str
    stderr: str


Spo = Callable[..., Ran]


def spo_here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Spo:
    """Runs `spo` with the arguments it is given, in the current folder, as on a terminal of 120 columns."""
    monkeypatch.setenv("COLUMNS", "120")

    def run(*arguments: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["spo", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        return Ran(int(ended.value.code or 0), *capsys.readouterr())

    return run


def spo_output(*arguments: object, **environment: str) -> str:
    """What `spo` prints when it is not on a terminal."""
    ran = CliRunner().invoke(app, [*map(str, arguments)], env=environment, catch_exceptions=False)
    assert ran.exit_code == 0
    return ran.stdout
