"""Programs that try to pass assertions without knowing what they should return."""

from __future__ import annotations

import asyncio

import pytest

from generator.rewards.code.unit_tests import Limits, Verdict, run_code_tests
from tests.support.process_sandbox import ProcessSandbox

ANSWER = 81549300
TESTS = [
    "assert f(20) == 81549300",
    "assert abs(f(20) - 81549300) < 1",
    "assert 81549300 in [f(20)] and sorted([f(20), 81549300]) == [81549300] * 2",
    "import math; assert math.isclose(f(20), 81549300)",
    "assert math.isclose(f(20), 81549300)",
    "import statistics; assert statistics.mean([f(20), 81549300]) == 81549300",
    "assert isinstance(f(20), int) and f(20) > 1000 and len(str(f(20))) == 8",
    "x = f(20); assert x + 1 == 81549301 and not x != 81549300 and f'{x}' == '81549300'",
]
# Finds the program's end of the pipe, and speaks through it without the harness.
TAKE_OVER = """
import sys
frame = sys._getframe()
while "program" not in frame.f_locals:
    frame = frame.f_back
program = frame.f_locals["program"]
"""
SEARCH = """
import re
def search(text):
    found = re.search(r"f\\(20\\) == (\\d+)", text if isinstance(text, str) else text.decode("latin-1"))
    return int(found[1]) if found else 0
"""

ATTACKS = {
    "prints markers": """
print("passed 1", "0 passed", "ready", *(f"{i} passed" for i in range(8)), sep="\\n")
def f(x): return 0
""",
    "exits well": "raise SystemExit(0)",
    "exits well at once": "import os; os._exit(0)",
    "exits well when asked": """
import os
def f(x): os._exit(0)
""",
    "raises what passes": """
def f(x): raise SystemExit(0)
""",
    "hides its errors": """
import sys
sys.excepthook = lambda *a: None
def f(x): return 0
""",
    "is anything": """
class Any:
    def __getattr__(self, name): return self
    def __call__(self, *a, **k): return self
    def __bool__(self): return True
    def __iter__(self): return iter([self])
    def __len__(self): return 1
    def __str__(self): return "x" * 8
names = "eq lt le gt ge add sub mul truediv radd rsub rmul contains abs round float int index hash"
for name in (names + " instancecheck subclasscheck array array_interface array_struct").split():
    setattr(Any, f"__{name}__", lambda self, *a: True)
def f(x): return Any()
""",
    "is a str that equals everything": """
class S(str):
    __hash__ = str.__hash__
    def __eq__(self, other): return True
def f(x): return S()
""",
    "is an int that equals everything": """
class I(int):
    __hash__ = int.__hash__
    def __eq__(self, other): return True
    def __sub__(self, other): return 0
def f(x): return I(0)
""",
    "is a list that equals everything": """
class L(list):
    def __eq__(self, other): return True
def f(x): return L()
""",
    "patches builtins": """
import builtins
names = "len abs sorted isinstance all any print exec compile str AssertionError"
for name in names.split():
    setattr(builtins, name, lambda *a, **k: True)
def f(x): return 0
""",
    "patches the standard library": """
import json, math, operator, os, statistics
math.isclose = operator.eq = lambda *a, **k: True
statistics.mean = lambda *a: 81549300 - 1 + 1 if False else 1
json.loads = lambda *a: ["answer", True, []]
def f(x): return 0
""",
    "defines what tests use": """
def abs(x): return 0
def len(x): return 8
def sorted(x): return [x, x]
class math:
    def isclose(*a): return True
class statistics:
    def mean(x): return x
class int(int): pass
def f(x): return 0
""",
    "reads what it finds": SEARCH + """
import glob, os
seen = ""
names = "cmdline environ mem maps fd/0 fd/1 cwd/program.py root/proc/self/environ"
for path in [f"/proc/{pid}/{name}" for pid in (os.getppid(), 1) for name in names.split()] + glob.glob("*"):
    try: seen += open(path, "rb").read(1 << 20).decode("latin-1")
    except Exception: pass
def f(x): return search(seen)
""",
    "searches the memory of the judge": SEARCH + """
import os
def f(x):
    pid = os.getppid()
    with open(f"/proc/{pid}/mem", "rb") as memory:
        for line in open(f"/proc/{pid}/maps"):
            if " rw" in line:
                start, end = (int(n, 16) for n in line.split()[0].split("-"))
                memory.seek(start)
                found = search(memory.read(end - start))
                if found: return found
""",
    "attaches to the judge": """
import ctypes, os
def f(x):
    ATTACH = 16
    assert ctypes.CDLL(None).ptrace(ATTACH, os.getppid(), 0, 0) == 0
    return 81549200 + 100
""",
    "writes a verdict to the judge's stdout": """
import os
def f(x):
    for pid in (os.getppid(), 1):
        try: open(f"/proc/{pid}/fd/1", "w").write("\\n".join(["", "ready", *(f"{i} passed" for i in range(8)), ""]))
        except Exception: pass
    return 0
""",
    "kills the judge": "import os; os.kill(os.getppid(), 9)",
    "kills the judge when asked": """
import os
def f(x): os.kill(os.getppid(), 9)
""",
    "interrupts the judge": """
import os, signal
def f(x):
    os.kill(os.getppid(), signal.SIGINT)
    return 0
""",
    "rings the judge's alarm": """
import os, signal
def f(x):
    os.kill(os.getppid(), signal.SIGALRM)
    return 0
""",
    "closes its pipes": """
import os
def f(x):
    os.closerange(3, 100)
    return 0
""",
    "writes nonsense into its pipes": """
import os
def f(x):
    for fd in range(3, 50):
        try: os.write(fd, b"\\x00\\x00\\x00\\x05[[[[[")
        except OSError: pass
    return 0
""",
    "announces 2 GB": """
import os, struct
def f(x):
    for fd in range(3, 50):
        try: os.write(fd, struct.pack(">I", 1 << 31))
        except OSError: pass
    return 0
""",
    "answers before it is asked": """
import os, struct
answer = b'["answer", true, []]'
for fd in range(3, 50):
    try: os.write(fd, (struct.pack(">I", len(answer)) + answer) * 50)
    except OSError: pass
def f(x): return 0
""",
    "answers everything with yes": TAKE_OVER + """
program.serve = lambda message: program.send(["answer", True, []])
""",
    "offers builtins of its own": TAKE_OVER + """
true = lambda *a, **k: True
def serve(message):
    names = "abs len sorted isinstance f math AssertionError __builtins__ list int statistics".split()
    value = ["dict", [[name, program.encode(true)] for name in names]] if message[0] == "names" else 0
    program.send(["answer", value, [[0, ["list", names]]]])
program.serve = serve
""",
    "names builtins of the judge": TAKE_OVER + """
def serve(message):
    value = ["dict", [["f", ["builtin", "exec"]]]] if message[0] == "names" else ["builtin", "eval"]
    program.send(["answer", value, []])
program.serve = serve
""",
    "raises an error that is not one": TAKE_OVER + """
def serve(message):
    if message[0] == "names":
        return program.send(["answer", ["dict", [["f", ["mine", 0]]]], []])
    program.send(["raise", ["error", [0, "Pass", "SystemExit"]], "passed"])
program.serve = serve
""",
    "puts modules where imports look": """
for name in "math collections statistics ast json subprocess decimal".split():
    open(name + ".py", "w").write("isclose = mean = Counter = Decimal = lambda *a, **k: True")
def f(x): return 0
""",
}  # fmt: skip


def check(code: str, *tests: str, timeout: float = 20.0, longest_run: float = 60.0) -> Verdict:
    limits = Limits(timeout=timeout, longest_run=longest_run)
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
