"""One hostile program: what it does, and how it may end."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from sandbox_client.types import CommandStatus, RunCodeResponse, Status

PRELUDE = """
import contextlib, ctypes, errno, glob, json, os, signal, socket, sys, threading, time
told = json.loads(sys.stdin.read())
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p

def leak(what):
    print("LEAK", what, flush=True)

def refused(call, *arguments):
    "What the sandbox must not allow."
    try:
        got = call(*arguments)
    except (OSError, MemoryError) as error:
        return error
    leak(f"{call.__name__}{arguments} gave {got!r}")

"""
ENDS = "contained"


@dataclass(frozen=True)
class Program:
    """A program that says `contained` when it has tried everything, and `LEAK` for what it got.

    Attributes:
        stopped: by what the program, which goes on until it is: time, memory, somehow; None: it comes to its own end.
        seconds: its time limit.
        leaks_bare: run as a plain process it harmlessly finds leaks: the program is able to fail.
    """

    name: str
    code: str
    language: str = "python"
    stopped: str | None = None
    seconds: float = 60.0
    memory: int = 256
    leaks_bare: bool = False

    def check(self, answer: RunCodeResponse) -> None:
        """Assert that the program got nowhere."""
        result = answer.run_result
        assert result is not None, answer
        stdout = result.stdout or ""
        assert "LEAK" not in stdout, stdout[:2000]
        assert len(stdout) + len(result.stderr or "") <= (2 << 20) + 500
        if self.stopped == "time":
            assert result.status is CommandStatus.TIME_LIMIT_EXCEEDED, answer
            assert result.return_code is None
        elif self.stopped == "memory":
            assert (answer.status, result.return_code) == (Status.FAILED, 137), answer
            assert "memory" in answer.message
        elif self.stopped is None:
            assert result.status is CommandStatus.FINISHED, answer
            assert stdout.rstrip().endswith(ENDS), (stdout[-500:], (result.stderr or "")[-2000:], answer.message)


def python(name: str, code: str, **options: object) -> Program:
    """A Python program; unless it fights, it says when it is done."""
    text = PRELUDE + textwrap.dedent(code).strip()
    return Program(name, text + (f'\nprint("{ENDS}")\n' if "stopped" not in options else "\n"), **options)  # type: ignore[arg-type]


def bash(name: str, code: str, **options: object) -> Program:
    """A bash program."""
    return Program(name, textwrap.dedent(code).strip() + "\n", "bash", **options)  # type: ignore[arg-type]
