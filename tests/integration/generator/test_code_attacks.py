"""Programs that try to pass assertions without knowing what they should return."""

from __future__ import annotations

import asyncio

import pytest

from generator.rewards.code.unit_tests import CodeLimits, CodeVerdict, run_code_tests
from tests.support.code_attacks import ANSWER, ATTACKS, SEARCH, TAKE_OVER, TESTS
from tests.support.process_sandbox import ProcessSandbox


def check(code: str, *tests: str, timeout: float = 20.0, longest_run: float = 60.0) -> CodeVerdict:
    limits = CodeLimits(timeout=timeout, longest_run=longest_run)
    return asyncio.run(run_code_tests(ProcessSandbox(), code, list(tests), limits=limits))


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_program_passes_without_the_answer(attack: str) -> None:
    verdict = check(ATTACKS[attack], *TESTS, timeout=2.0)
    assert verdict.total == len(TESTS)
    assert verdict.passed == 0, list(zip(TESTS, verdict.results, strict=True))


def test_a_program_that_stops_the_judge_fails() -> None:
    code = "import os, signal\ndef f(x): os.kill(os.getppid(), signal.SIGSTOP)"
    verdict = check(code, TESTS[0], longest_run=4.0)
    assert [result.reason for result in verdict.results] == ["time limit"]


def test_what_the_attacks_lack_is_the_answer() -> None:
    assert check(f"def f(x): return {ANSWER}", *TESTS).passed == len(TESTS)


def test_modules_are_not_imported_from_where_the_program_can_put_them() -> None:
    # `strptime` imports `_strptime` when it is first called.
    code = '''
open("_strptime.py", "w").write("""
class Any:
    def __eq__(self, other): return True
def _strptime_datetime(*arguments): return Any()
""")
def f(x): return 0
'''
    verdict = check(code, "import datetime", "assert f(20) == datetime.datetime.strptime('2020', '%Y')")
    assert verdict.results[0].reason == "AssertionError"


def test_the_judge_takes_no_function_from_the_program() -> None:
    # Were `eval` the judge's own, the program's text would run in the judge.
    code = (
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
    assert check(code, "assert f(20)(f(21)) == 81549300").passed == 0


def test_numpy_is_not_pointed_at_memory_of_the_judge() -> None:
    code = """
class Pointer:
    __array_interface__ = {"data": (8, False), "shape": (1 << 20,), "typestr": "|u1", "version": 3}
def f(x): return Pointer()
"""
    verdict = check(code, "import numpy", "numpy.asarray(f(20)).sum()", "assert f(20) is not None")
    assert verdict.results[1].passed, verdict  # the judge lives


def test_what_a_test_passes_to_a_program_leads_not_to_the_test() -> None:
    # `keep` gives the program a function, a generator and an object of the judge to start from.
    code = SEARCH + TAKE_OVER + """
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
    verdict = check(
        code,
        "class Open:\n    shown = 2\n    def method(self): return 81549300",
        "assert keep(lambda: 81549300, (81549300 for _ in [1]), Open(), Open, Open().method) == 0",
        "assert f(20) == 81549300",
        "assert f(20) == []",
    )
    assert [result.passed for result in verdict.results] == [True, False, True], verdict
