"""Programs that try to get out, or to take more than is theirs: each ends in a bounded result, the host unharmed.

They stand in a table: a line `#: name | how it ends`, and below it what the program does.
"""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass
from typing import Any

import pytest

from generator.rewards.code.unit_tests import CodeLimits, run_code_tests
from sandbox_client import CommandStatus, RunCodeRequest, RunCodeResponse, Status
from sandbox_client.isolation import Canary
from sandbox_client.local import LocalSandbox
from sandbox_client.settings import Settings
from tests.integration.sandbox.attacks import PROGRAMS
from tests.support import code_attacks
from tests.support.sandbox import SandboxUnderTest, programs_of

pytestmark = pytest.mark.usefixtures("bubblewrap")

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
        stopped: what ends a program that goes on until then: time, memory, somehow; empty: it comes to its own end.
        seconds, memory: its limits.
        leaks_bare: run as a plain process it harmlessly finds leaks, which shows that the program is able to.
    """

    code: str
    language: str = "python"
    stopped: str = ""
    seconds: float = 60.0
    memory: float = 256
    leaks_bare: float = 0

    def request(self, host: dict[str, Any]) -> RunCodeRequest:
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


def parsed(table: str) -> dict[str, Attack]:
    attacks = {}
    for header, code in re.findall(r"^#: (.+)\n((?:(?!#: ).*\n)+)", table, re.MULTILINE):
        name, _, how = header.partition(" | ")
        options = dict(option.split("=") for option in how.split())
        numbers = {key: float(options.pop(key)) for key in ("seconds", "memory", "leaks_bare") if key in options}
        attacks[name] = Attack(code, **options, **numbers)
    return attacks


ATTACKS = parsed(PROGRAMS)
GREEDY = [
    name for name, attack in ATTACKS.items() if attack.stopped == "memory" or name in ("disk", "millions of files")
]
Answers = dict[str, RunCodeResponse]


def answers_of(runner: SandboxUnderTest, names: list[str], host: dict[str, Any]) -> Answers:
    return dict(zip(names, runner.run_all(ATTACKS[name].request(host) for name in names), strict=True))


@pytest.fixture(scope="module")
def answers(http: SandboxUnderTest, host: dict[str, Any]) -> Answers:
    return answers_of(http, list(ATTACKS), host)


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_contained(name: str, answers: Answers) -> None:
    ATTACKS[name].check(answers[name])


def test_attacks_leave_nothing_and_harm_nothing(answers: Answers, http: SandboxUnderTest, canary: Canary) -> None:
    assert programs_of(http.pid) == []
    assert canary.harm() == {}


def test_memory_is_bounded_without_a_control_group(loop: asyncio.Runner, host: dict[str, Any]) -> None:
    sandbox = LocalSandbox(Settings(workers=2, cgroup="none", disk_mb=64))
    answers = answers_of(SandboxUnderTest(sandbox, 0, loop), GREEDY, host)
    loop.run(sandbox.close())
    for name in GREEDY:
        ATTACKS[name].check(answers[name])


def test_the_same_programs_find_leaks_without_isolation(loop: asyncio.Runner, host: dict[str, Any]) -> None:
    """Their silence means something: as plain processes they do report leaks."""
    names = [name for name, attack in ATTACKS.items() if attack.leaks_bare]
    with Canary() as canary:
        bare = LocalSandbox(Settings(workers=4, isolated=False))
        answers = answers_of(SandboxUnderTest(bare, 0, loop), names, {**host, **canary.parameters()})
        loop.run(bare.close())
    for name, answer in answers.items():
        assert answer.run_result is not None
        assert "LEAK" in (answer.run_result.stdout or ""), name


ON_THE_JUDGE = (
    "reads what it finds",
    "searches the memory of the judge",
    "attaches to the judge",
    "writes a verdict to the judge's stdout",
    "interrupts the judge",
    "puts modules where imports look",
)
CODE = {name: code_attacks.ATTACKS[name] for name in ON_THE_JUDGE}
CODE |= {"right": f"def f(x): return {code_attacks.ANSWER}"}


@pytest.mark.parametrize("name", CODE)
def test_only_the_right_program_passes_code_tests(http: SandboxUnderTest, name: str) -> None:
    limits, tests = CodeLimits(timeout=10.0, longest_run=30.0, memory_mb=512), code_attacks.TESTS
    verdict = http.loop.run(run_code_tests(http.sandbox, CODE[name], tests, limits=limits))
    assert (verdict.passed, verdict.total) == (len(tests) if name == "right" else 0, len(tests))
