"""Assertions about a program mean what Python means by them; each counts; a sandbox that fails gives no verdict."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from generator.rewards.code.unit_tests import CodeLimits, CodeVerdict, run_code_tests
from sandbox_client import RunCodeRequest, RunCodeResponse, SandboxUnavailable
from tests.support.code_meanings import MEANINGS, parts
from tests.support.process_sandbox import ProcessSandbox

PATIENT = CodeLimits(timeout=20.0, longest_run=60.0)


def check(code: str, *tests: str, limits: CodeLimits = PATIENT, **more: Any) -> CodeVerdict:
    job = {"assertions": list(tests), **more}
    return asyncio.run(run_code_tests(ProcessSandbox(), code, job, limits=limits))


def passed(verdict: CodeVerdict) -> list[bool]:
    return [result.passed for result in verdict.results]


@pytest.mark.parametrize("meaning", MEANINGS)
def test_assertions_mean_what_they_mean_in_python(meaning: str) -> None:
    program, tests = parts(MEANINGS[meaning])
    verdict = check(program, *tests)
    assert verdict.total >= 4
    assert verdict.passed == verdict.total, [result for result in verdict.results if not result.passed]


LOOP = "while True: pass"
WRONG = [
    ("def f(x): return x", "assert f(1) == 2", "AssertionError"),
    ("def f(x): return 1 / 0", "assert f(1) == 2", "ZeroDivisionError: division by zero"),
    ("def g(x): return 2", "assert f(1) == 2", "NameError"),
    ("def f(x): return (1, 2)", "assert f(1) == [1, 2]", "AssertionError"),
    ("def f(x: return 2", "assert f(1) == 2", "SyntaxError"),
    ("import nothing_of_this_name\ndef f(x): return 2", "assert f(1) == 2", "ModuleNotFoundError"),
    ("def f(x): return 2\nf()", "assert f(1) == 2", "TypeError"),
    ("def f(x):\n    " + LOOP, "assert f(1) == 2", "time limit"),
    (LOOP, "assert f(1) == 2", "time limit"),
    ("def f(x):\n    while True: yield 1", "assert list(f(1)) == 2", "time limit"),
    ("def f(x):\n    " + LOOP, "try:\n    f(1)\nexcept BaseException:\n    pass", "time limit"),
    ("def f(x): return f(x)", "assert f(1) == 2", "RecursionError"),
    ("def f(x):\n    a = []\n    a.append(a)\n    return a", "assert f(1) == 2", "RecursionError"),
    ("def f(x): return 'x' * (20 << 20)", "assert f(1) == 2", "the program ended"),
    ("import os\ndef f(x): os.kill(os.getpid(), 11)", "assert f(1) == 2", "the program ended"),
    ("", "assert f(1) == 2", "NameError"),
    ("\x00", "assert f(1) == 2", ""),
    ("\ud800", "assert f(1) == 2", ""),
]


@pytest.mark.parametrize("case", WRONG, ids=[repr(f"{case[0]} {case[2]}") for case in WRONG])
def test_a_wrong_program_fails_with_its_reason(case: tuple[str, str, str]) -> None:
    seconds = 0.5 if case[2] == "time limit" else 20.0
    verdict = check(case[0], case[1], limits=CodeLimits(timeout=seconds))
    assert (verdict.passed, verdict.total) == (0, 1)
    assert verdict.results[0].reason.startswith(case[2])
    assert 0 < len(verdict.results[0].reason) < 200


def test_each_assertion_counts_and_preparation_does_not() -> None:
    verdict = check(
        "def f(x): return x",
        "import math",
        "a = f(2)",
        "def same(x): return f(x) == x",
        "assert a == 2",
        "assert same(4)",
        "assert f(3) == 4",
        "assert f(math.pi) == math.pi",
    )
    assert passed(verdict) == [True, True, False, True]
    assert (verdict.passed, verdict.total, verdict.score(), verdict.score(partial=False)) == (3, 4, 0.75, 0.0)


@pytest.mark.parametrize("end", ["__import__('os')._exit(0)", f"exec('{LOOP}')"])
def test_a_program_that_ends_in_the_middle_fails_the_rest(end: str) -> None:
    code = f"def f(x):\n    if x == 2: {end}\n    return x"
    verdict = check(code, *[f"assert f({i}) == {i}" for i in range(5)], limits=CodeLimits(timeout=5.0))
    assert passed(verdict) == [True, True, False, False, False]
    assert verdict.results[4].reason.startswith("not run")


def test_an_exception_or_exit_in_one_test_leaves_the_others() -> None:
    code = "import sys\ndef f(x):\n    if x == 1: sys.exit(0)\n    if x == 2: raise KeyboardInterrupt\n    return x"
    assert passed(check(code, *[f"assert f({i}) == {i}" for i in range(4)])) == [True, False, False, True]


@pytest.mark.parametrize("name", ["pow", "string"])
def test_a_name_of_python_is_the_programs_if_it_is_the_entry_point(name: str) -> None:
    code = "def pow(a, b): return 0\ndef string(): pass\nstring.ascii_letters = ''"
    test = {"pow": "assert pow(2, 3) == 8", "string": "assert len(string.ascii_letters) == 52"}[name]
    assert check(code, test).passed == 1
    assert check(code, test, entry_point=name).passed == 0


def test_many_assertions_are_one_run_and_what_is_sent_as_code_holds_none_of_them() -> None:
    sandbox = ProcessSandbox()
    tests = [f"assert f({i}) == {i + 81549300 * (i % 10 == 0)}" for i in range(500)]
    verdict = asyncio.run(run_code_tests(sandbox, "def f(x): return x", tests, limits=PATIENT))
    assert (verdict.passed, verdict.total, len(sandbox.requests)) == (450, 500, 1)
    assert "81549300" not in sandbox.requests[0].code
    assert sandbox.requests[0].files == {}


class Fixed:
    """A sandbox with one answer."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.answer = RunCodeResponse.model_validate(fields)

    async def run_code(self, request: RunCodeRequest) -> RunCodeResponse:
        return self.answer

    async def close(self) -> None: ...


@pytest.mark.parametrize(
    "fields",
    [
        {"status": "SandboxError", "message": "no pod"},
        {"status": "Failed", "run_result": {"status": "Finished", "return_code": 127, "stderr": "python: not found"}},
        {"status": "Success", "run_result": {"status": "Finished", "return_code": 0, "stdout": "ready\n0 passed\n"}},
        {"status": "Failed", "run_result": {"status": "TimeLimitExceeded", "stdout": None}},
        {"status": "Failed", "compile_result": {"status": "Finished", "return_code": 1}},
    ],
)
def test_a_harness_that_did_not_start_is_no_verdict(fields: dict[str, Any]) -> None:
    with pytest.raises(SandboxUnavailable):
        asyncio.run(run_code_tests(Fixed(fields), "def f(): return 1", ["assert f() == 1"]))
