"""Assertions about a program mean what Python means by them, and no program passes them without the answer."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import ANY

import pytest

from generator.rewards.code.unit_tests import CodeLimits, CodeVerdict, run_code_tests
from sandbox_client import SandboxUnavailable
from tests.support.code_attacks import ANSWER, ATTACKS, SEARCH, TAKE_OVER, TESTS
from tests.support.code_meanings import MEANINGS, parts
from tests.support.process_sandbox import FixedSandbox, ProcessSandbox


def check(code: str, *tests: str, timeout: float = 20.0, longest_run: float = 60.0, **more: Any) -> CodeVerdict:
    limits = CodeLimits(timeout=timeout, longest_run=longest_run)
    return asyncio.run(run_code_tests(ProcessSandbox(), code, {"assertions": list(tests), **more}, limits=limits))


def passed(verdict: CodeVerdict) -> list[bool]:
    return [result.passed for result in verdict.results]


@pytest.mark.parametrize("meaning", MEANINGS)
def test_assertions_mean_what_they_mean_in_python(meaning: str) -> None:
    program, tests = parts(MEANINGS[meaning])
    verdict = check(program, *tests)
    assert verdict.total >= 3
    assert verdict.passed == verdict.total, [result for result in verdict.results if not result.passed]


WRONG = [
    ("def f(x): return x", "AssertionError"),
    ("def f(x): return 1 / 0", "ZeroDivisionError: division by zero"),
    ("def f(x: return 2", "SyntaxError"),
    ("def f(x):\n    while True: pass", "time limit"),
    ("def f(x):\n    while True: yield 1", "time limit"),
    ("def f(x): return f(x)", "RecursionError"),
    ("def f(x): return 'x' * (20 << 20)", "the program ended"),
    ("", "NameError"),
    ("\ud800", ""),
]


@pytest.mark.parametrize(("code", "reason"), WRONG, ids=[repr(f"{code} {reason}") for code, reason in WRONG])
def test_a_wrong_program_fails_with_its_reason(code: str, reason: str) -> None:
    test = "assert list(f(1)) == 2" if "yield" in code else "assert f(1) == 2"
    test = f"try:\n    {test}\nexcept BaseException:\n    pass" if reason == "time limit" else test  # it ends anyway
    verdict = check(code, test, timeout=0.5 if reason == "time limit" else 20.0)
    assert (verdict.passed, verdict.total) == (0, 1)
    assert verdict.results[0].reason.startswith(reason)
    assert 0 < len(verdict.results[0].reason) < 200


ENDS = "import os\ndef f(x):\n    if x == 2: os._exit(0)\n    return x"
LEAVES = "import sys\ndef f(x):\n    if x == 1: sys.exit(0)\n    if x == 2: raise KeyboardInterrupt\n    return x"
COUNTED = ["import math", "a = f(2)", "def same(x): return f(x) == x", "assert a == 2", "assert same(4)"]
COUNTED += ["assert f(3) == 4", "assert f(math.pi) == math.pi"]


@pytest.mark.parametrize(
    ("code", "tests", "results"),
    [
        ("def f(x): return x", COUNTED, [True, True, False, True]),  # preparation does not count
        (ENDS, [f"assert f({i}) == {i}" for i in range(5)], [True] * 2 + [False] * 3),
        (LEAVES, [f"assert f({i}) == {i}" for i in range(4)], [True, False, False, True]),
    ],
    ids=["each counts", "ends in the middle", "leaves in one test"],
)
def test_each_assertion_counts(code: str, tests: list[str], results: list[bool]) -> None:
    verdict = check(code, *tests, timeout=5.0)
    assert passed(verdict) == results
    share = sum(results) / len(results)
    assert (verdict.score(), verdict.score(partial=False)) == (share, 0.0)
    if code == ENDS:
        assert verdict.results[4].reason.startswith("not run")


@pytest.mark.parametrize(("entry_point", "count"), [(None, 1), ("pow", 0)])
def test_a_name_of_python_is_the_programs_as_entry_point(entry_point: str | None, count: int) -> None:
    for code in ("def pow(a, b): return 0", "x = 1"):
        assert check(code, "assert pow(2, 3) == 8", entry_point=entry_point).passed == count


def test_many_assertions_are_one_run_whose_code_holds_none() -> None:
    sandbox = ProcessSandbox()
    tests = [f"assert f({i}) == {i + 81549300 * (i % 10 == 0)}" for i in range(100)]
    verdict = asyncio.run(run_code_tests(sandbox, "def f(x): return x", tests, limits=CodeLimits(timeout=20.0)))
    assert (verdict.passed, verdict.total, len(sandbox.requests)) == (90, 100, 1)
    assert "81549300" not in sandbox.requests[0].code
    assert sandbox.requests[0].files == {}


@pytest.mark.parametrize(
    "fields",
    [
        {"status": "SandboxError", "message": "no pod"},
        {"status": "Success", "run_result": {"status": "Finished", "return_code": 0, "stdout": "ready\n0 passed\n"}},
    ],
)
def test_a_harness_that_did_not_start_is_no_verdict(fields: dict[str, Any]) -> None:
    with pytest.raises(SandboxUnavailable):
        asyncio.run(run_code_tests(FixedSandbox(**fields), "def f(): return 1", ["assert f() == 1"]))


# Programs that try to pass assertions without knowing what they should return. Each of them takes about a second;
# every third runs in `make test`.
BY_TURNS = [
    pytest.param(name, marks=[] if number % 3 == 0 else [pytest.mark.slow]) for number, name in enumerate(ATTACKS)
]


@pytest.mark.parametrize("attack", BY_TURNS)
def test_no_program_passes_without_the_answer(attack: str) -> None:
    verdict = check(ATTACKS[attack], *TESTS, timeout=2.0)
    assert verdict.total == len(TESTS)
    assert verdict.passed == 0, list(zip(TESTS, verdict.results, strict=True))


def test_what_the_attacks_lack_is_the_answer() -> None:
    assert check(f"def f(x): return {ANSWER}", *TESTS).passed == len(TESTS)
    assert check(f"def f(x): return {ANSWER + 1}", *TESTS).passed == 0  # nor does a forged answer close to it


@pytest.mark.parametrize("attack", [name for name in ATTACKS if name.startswith(("is a", "defines", "says"))])
def test_no_program_passes_calls_without_the_answer(attack: str) -> None:
    calls = {"fn_name": "f", "inputs": [[20], [21]], "outputs": [ANSWER, [ANSWER, {"a": [1]}]]}
    verdict = asyncio.run(run_code_tests(ProcessSandbox(), ATTACKS[attack], calls, limits=CodeLimits(timeout=2.0)))
    assert (verdict.passed, verdict.total) == (0, 2), verdict


# The judge imports `_strptime` when `strptime` is first called.
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
# The first statement of its tests fails, so that it does not define what the second one uses.
HELPER = """
calls = []
class y: pass
def near(a, b): return True
def f(x):
    calls.append(x)
    if len(calls) == 1: raise ValueError
    return y
"""
HELPED = ["y = f(20)\ndef near(a, b): return abs(a - b) < 1", "assert near(f(20), 81549300)", "assert y == 81549300"]
MAPPED = ["def right(x): return f(x) == 81549300", "assert all(map(right, [20, 20]))", "assert not list(map(f, [20]))"]
UNPRINTABLE = """
class Key:
    def __hash__(self): return 7
    def __repr__(self): 1 / 0
def f(x): return Key() if x else 1
"""


@pytest.mark.parametrize(
    ("code", "tests", "results"),
    [
        (STRPTIME, ["import datetime", "assert f(20) == datetime.datetime.strptime('2020', '%Y')"], [False]),
        (EVAL, ["assert f(20)(f(21)) == 81549300"], [False]),
        # Points numpy at memory of the judge, which goes on.
        (POINTER, ["import numpy", "numpy.asarray(f(20)).sum()", "assert f(20) is not None"], [ANY, True]),
        # Starts from what a test passes to it.
        (KEEP, KEPT, [True, False, True]),
        (HELPER, HELPED, [False, False]),
        ("def f(x): raise StopIteration", MAPPED, [False, False]),
        (UNPRINTABLE, ["assert {}[f(20)] == 2", "assert f(0) == 1"], [False, True]),
    ],
    ids=["imports", "functions", "memory", "objects", "helper", "loop", "error fails"],
)
def test_no_program_passes_by_what_the_judge_or_a_test_does(code: str, tests: list[str], results: list[bool]) -> None:
    assert passed(check(code, *tests)) == results


def test_a_judge_that_is_stopped_is_no_success() -> None:
    code = "import os, signal\ndef f(x): os.kill(os.getppid(), signal.SIGSTOP)"
    assert [result.reason for result in check(code, TESTS[0], longest_run=3.0).results] == ["time limit"]
