"""Assertions about a program mean what Python means by them, and no program passes them without the answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from generator.rewards.code.unit_tests import CodeLimits, CodeVerdict, run_code_tests
from sandbox_client import RunCodeRequest, RunCodeResponse, SandboxUnavailable
from tests.support.code_attacks import ANSWER, ATTACKS, SEARCH, TAKE_OVER, TESTS
from tests.support.code_meanings import MEANINGS, parts
from tests.support.process_sandbox import ProcessSandbox


def check(code: str, *tests: str, timeout: float = 20.0, longest_run: float = 60.0, **more: Any) -> CodeVerdict:
    limits = CodeLimits(timeout=timeout, longest_run=longest_run)
    return asyncio.run(run_code_tests(ProcessSandbox(), code, {"assertions": list(tests), **more}, limits=limits))


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
    ("def f(x): return x", "AssertionError"),
    ("def f(x): return 1 / 0", "ZeroDivisionError: division by zero"),
    ("def f(x): return (1, 2)", "AssertionError"),
    ("def f(x: return 2", "SyntaxError"),
    ("def f(x): return 2\nf()", "TypeError"),
    ("def f(x):\n    " + LOOP, "time limit"),
    (LOOP, "time limit"),
    ("def f(x):\n    while True: yield 1", "time limit"),
    ("def f(x): return f(x)", "RecursionError"),
    ("def f(x):\n    a = []\n    a.append(a)\n    return a", "RecursionError"),
    ("def f(x): return 'x' * (20 << 20)", "the program ended"),
    ("import os\ndef f(x): os.kill(os.getpid(), 11)", "the program ended"),
    ("", "NameError"),
    ("\ud800", ""),
]


@pytest.mark.parametrize(("code", "reason"), WRONG, ids=[repr(f"{code} {reason}") for code, reason in WRONG])
def test_a_wrong_program_fails_with_its_reason(code: str, reason: str) -> None:
    test = {WRONG[2][0]: "assert f(1) == [1, 2]", WRONG[7][0]: "assert list(f(1)) == 2"}
    verdict = check(code, test.get(code, "assert f(1) == 2"), timeout=0.5 if reason == "time limit" else 20.0)
    assert (verdict.passed, verdict.total) == (0, 1)
    assert verdict.results[0].reason.startswith(reason)
    assert 0 < len(verdict.results[0].reason) < 200


def test_a_test_that_catches_everything_still_ends() -> None:
    verdict = check("def f(x):\n    " + LOOP, "try:\n    f(1)\nexcept BaseException:\n    pass", timeout=0.5)
    assert [result.reason for result in verdict.results] == ["time limit"]


ENDS = "def f(x):\n    if x == 2: {}\n    return x"
LEAVES = "import sys\ndef f(x):\n    if x == 1: sys.exit(0)\n    if x == 2: raise KeyboardInterrupt\n    return x"
COUNTED = ["import math", "a = f(2)", "def same(x): return f(x) == x", "assert a == 2", "assert same(4)"]
COUNTED += ["assert f(3) == 4", "assert f(math.pi) == math.pi"]


@pytest.mark.parametrize(
    ("code", "tests", "results"),
    [
        ("def f(x): return x", COUNTED, [True, True, False, True]),  # preparation does not count
        (
            ENDS.format("__import__('os')._exit(0)"),
            [f"assert f({i}) == {i}" for i in range(5)],
            [True] * 2 + [False] * 3,
        ),
        (ENDS.format(f"exec('{LOOP}')"), [f"assert f({i}) == {i}" for i in range(5)], [True] * 2 + [False] * 3),
        (LEAVES, [f"assert f({i}) == {i}" for i in range(4)], [True, False, False, True]),
    ],
    ids=["each counts", "ends in the middle", "hangs in the middle", "leaves in one test"],
)
def test_each_assertion_counts(code: str, tests: list[str], results: list[bool]) -> None:
    verdict = check(code, *tests, timeout=5.0)
    assert passed(verdict) == results
    share = sum(results) / len(results)
    assert (verdict.score(), verdict.score(partial=False)) == (share, 0.0)
    if code.startswith(ENDS[:30]):
        assert verdict.results[4].reason.startswith("not run")


def test_a_name_of_python_is_the_programs_as_entry_point() -> None:
    code = "def pow(a, b): return 0"
    assert check(code, "assert pow(2, 3) == 8").passed == 1
    assert check(code, "assert pow(2, 3) == 8", entry_point="pow").passed == 0
    assert check("x = 1", "assert pow(2, 3) == 8", entry_point="pow").passed == 0, "which defines none"


def test_many_assertions_are_one_run_whose_code_holds_none() -> None:
    sandbox = ProcessSandbox()
    tests = [f"assert f({i}) == {i + 81549300 * (i % 10 == 0)}" for i in range(500)]
    verdict = asyncio.run(run_code_tests(sandbox, "def f(x): return x", tests, limits=CodeLimits(timeout=20.0)))
    assert (verdict.passed, verdict.total, len(sandbox.requests)) == (450, 500, 1)
    assert "81549300" not in sandbox.requests[0].code
    assert sandbox.requests[0].files == {}


@pytest.mark.parametrize(
    "fields",
    [
        {"status": "SandboxError", "message": "no pod"},
        {"status": "Failed", "run_result": {"status": "Finished", "return_code": 127, "stderr": "python: not found"}},
        {"status": "Success", "run_result": {"status": "Finished", "return_code": 0, "stdout": "ready\n0 passed\n"}},
        {"status": "Failed", "compile_result": {"status": "Finished", "return_code": 1}},
    ],
)
def test_a_harness_that_did_not_start_is_no_verdict(fields: dict[str, Any]) -> None:
    class FixedSandbox(ProcessSandbox):
        async def run_code(self, request: RunCodeRequest) -> RunCodeResponse:
            return RunCodeResponse.model_validate(fields)

    with pytest.raises(SandboxUnavailable):
        asyncio.run(run_code_tests(FixedSandbox(), "def f(): return 1", ["assert f() == 1"]))


# Programs that try to pass assertions without knowing what they should return.


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_program_passes_without_the_answer(attack: str) -> None:
    verdict = check(ATTACKS[attack], *TESTS, timeout=2.0)
    assert verdict.total == len(TESTS)
    assert verdict.passed == 0, list(zip(TESTS, verdict.results, strict=True))


CALLS = {"fn_name": "f", "inputs": [[20], [21]], "outputs": [81549300, [81549300, {"a": [1]}]]}


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_program_passes_calls_without_the_answer(attack: str) -> None:
    verdict = asyncio.run(run_code_tests(ProcessSandbox(), ATTACKS[attack], CALLS, limits=CodeLimits(timeout=2.0)))
    assert (verdict.passed, verdict.total) == (0, 2), verdict


def test_what_the_attacks_lack_is_the_answer() -> None:
    assert check(f"def f(x): return {ANSWER}", *TESTS).passed == len(TESTS)


STRPTIME = '''
open("_strptime.py", "w").write("""
class Any:
    def __eq__(self, other): return True
def _strptime_datetime(*arguments): return Any()
""")
def f(x): return 0
'''
# Were `eval` the judge's own, the program's text would run in the judge.
EVAL = (
    TAKE_OVER
    + """
text = "type('Any', (), {'__eq__': lambda self, other: True})()"
def serve(message):
    operation, arguments, _ = message
    value = ["builtin", "eval"] if arguments[1:] == [20] else text
    value = ["dict", [["f", ["mine", 0]]]] if operation == "names" else value
    program.send(["answer", value, []])
program.serve = serve
"""
)
POINTER = """
class Pointer:
    __array_interface__ = {"data": (8, False), "shape": (1 << 20,), "typestr": "|u1", "version": 3}
def f(x): return Pointer()
"""
# `keep` gives the program a function, a generator and an object of the judge to start from.
KEEP = SEARCH + TAKE_OVER + """
def keep(*objects): return 0
names = "__globals__ __code__ __self__ __class__ __dict__ __init__ __module__ gi_frame gi_code f_back f_globals f_code"
def ask(number, name):
    program.send(["get", [["yours", number], name], {}])
    kind, value, _ = program.receive()
    return value if kind == "answer" else None
def f(x):
    seen, open = [], list(range(5))
    for number in open:
        for name in names.split() + ["co_consts", "co_names", "secret"]:
            value = ask(number, name)
            seen.append(value)
            if isinstance(value, list) and value[0] == "mine" and len(open) < 100:
                open.append(value[1])
    return search(repr(seen)) or [value for value in seen if value == 81549300 or "81549300" in repr(value)]
"""  # fmt: skip
KEPT = [
    "class Open:\n    shown = 2\n    def method(self): return 81549300",
    "assert keep(lambda: 81549300, (81549300 for _ in [1]), Open(), Open, Open().method) == 0",
    "assert f(20) == 81549300",
    "assert f(20) == []",
]


# Tests whose first statement the program makes fail, so that it does not define what the second one uses.
HELPED = ["y = f(20)\ndef near(a, b): return abs(a - b) < 1", "assert near(f(20), 81549300)", "assert y == 81549300"]
HELPER = """
calls = []
class y: pass
def near(a, b): return True
def f(x):
    calls.append(x)
    if len(calls) == 1: raise ValueError
    return y
"""
MAPPED = ["def right(x): return f(x) == 81549300", "assert all(map(right, [20, 20]))", "assert not list(map(f, [20]))"]
FAILS_TO_SHOW = """
class Key:
    def __hash__(self): return 7
    def __repr__(self): {repr}
def f(x): return Key() if x else 1
"""


@pytest.mark.parametrize(
    ("code", "tests", "results"),
    [
        (HELPER, HELPED, [False, False]),
        ("def f(x): raise StopIteration", MAPPED, [False, False]),
        (FAILS_TO_SHOW.format(repr="1 / 0"), ["assert {}[f(20)] == 2", "assert f(0) == 1"], [False, True]),
        (FAILS_TO_SHOW.format(repr="exit()"), ["assert {}[f(20)] == 2", "assert f(0) == 1"], [False, True]),
        (FAILS_TO_SHOW.format(repr=LOOP), ["assert {}[f(20)] == 2", "assert f(0) == 1"], [False, False]),
    ],
    ids=["helper", "loop", "error fails", "error exits", "error hangs"],
)
def test_no_program_passes_by_what_a_test_leaves_undone(code: str, tests: list[str], results: list[bool]) -> None:
    assert passed(check(code, *tests, timeout=2.0 if LOOP in code else 60.0)) == results


@pytest.mark.parametrize(
    ("code", "tests", "longest_run", "results"),
    [
        # Stops the judge.
        ("import os, signal\ndef f(x): os.kill(os.getppid(), signal.SIGSTOP)", TESTS[:1], 4.0, ["time limit"]),
        # Puts a module where the judge imports: `strptime` imports `_strptime` when it is first called.
        (
            STRPTIME,
            ["import datetime", "assert f(20) == datetime.datetime.strptime('2020', '%Y')"],
            60.0,
            ["AssertionError"],
        ),
        (EVAL, ["assert f(20)(f(21)) == 81549300"], 60.0, [None]),
        # Points numpy at memory of the judge, which goes on.
        (POINTER, ["import numpy", "numpy.asarray(f(20)).sum()", "assert f(20) is not None"], 60.0, ["*", ""]),
        # Starts from what a test passes to it.
        (KEEP, KEPT, 60.0, ["", None, ""]),
    ],
    ids=["stops the judge", "imports", "functions", "memory", "objects"],
)
def test_the_judge_gives_nothing_away(
    code: str, tests: list[str], longest_run: float, results: list[str | None]
) -> None:
    """The reasons of failure; "" for a test that passes, None for any reason, * for anything."""
    verdict = check(code, *tests, longest_run=longest_run)
    for result, reason in zip(verdict.results, results, strict=True):
        assert reason == "*" or result.passed == (reason == ""), verdict
        assert reason in ("*", None, result.reason), verdict
