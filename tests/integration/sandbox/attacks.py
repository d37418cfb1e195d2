"""Hostile programs as tables: a line `#: name | how it ends`, and below it what the program does."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from sandbox_client.types import CommandStatus, RunCodeRequest, RunCodeResponse, Status

PRELUDE = """
import contextlib, ctypes, errno, glob, json, os, signal, socket, sys, threading, time
host = json.loads(sys.stdin.read())
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


@dataclass(frozen=True)
class Attack:
    """A program that says `contained` when it has tried everything, and `LEAK` for what it got.

    Attributes:
        stopped: what ends a program that goes on until then: time, memory, anything; empty: it comes to its own end.
        seconds, memory: its limits.
        leaks_bare: run as a plain process it harmlessly finds leaks, which shows that the program is able to.
    """

    code: str
    language: str = "python"
    stopped: str = ""
    seconds: float = 60.0
    memory: int = 256
    leaks_bare: bool = False

    def request(self, host: dict[str, Any]) -> RunCodeRequest:
        """The attack by a program that knows this of the host."""
        done = "" if self.stopped else 'print("contained")\n'
        code = PRELUDE + self.code + done if self.language == "python" else self.code
        limits = {"run_timeout": self.seconds, "memory_limit_MB": self.memory}
        return RunCodeRequest(code=code, language=self.language, stdin=json.dumps(host), **limits)

    def check(self, answer: RunCodeResponse) -> None:
        """Assert that the program got nowhere."""
        result = answer.run_result
        assert result is not None, answer
        stdout, stderr = result.stdout or "", result.stderr or ""
        assert "LEAK" not in stdout, stdout[:2000]
        assert len(stdout) + len(stderr) <= (2 << 20) + 500
        if self.stopped == "time":
            assert (result.status, result.return_code) == (CommandStatus.TIME_LIMIT_EXCEEDED, None), answer
        elif self.stopped == "memory":
            assert (answer.status, result.return_code) == (Status.FAILED, 137), answer
            assert "memory" in answer.message
        elif not self.stopped:
            assert result.status is CommandStatus.FINISHED, answer
            assert stdout.rstrip().endswith("contained"), (stdout[-500:], stderr[-2000:], answer.message)


def attacks(table: str) -> dict[str, Attack]:
    """The attacks of a table, by name."""
    read = {}
    for header, code in re.findall(r"^#: (.+)\n((?:(?!#: ).*\n)+)", table, re.MULTILINE):
        name, _, how = header.partition(" | ")
        options: dict[str, Any] = dict(option.split("=") for option in how.split())
        for key in ("seconds", "memory", "leaks_bare"):
            if key in options:
                options[key] = float(options[key])
        read[name] = Attack(code, **options)
    assert len(read) == table.count("\n#: "), "a name stands twice"
    return read
