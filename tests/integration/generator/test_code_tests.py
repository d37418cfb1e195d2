"""Programs tested by stdin and stdout, what counts as the same output, where the program is, and the reward of it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from generator.rewards import Outcome
from generator.rewards.code.reward import Code
from generator.rewards.code.unit_tests import CodeLimits, CodeVerdict, extract_code, run_code_tests, same_output
from sandbox_client import RunCodeRequest, RunCodeResponse, SandboxUnavailable
from tests.support.process_sandbox import ProcessSandbox

DOUBLE = "print(2 * int(input()))"


def check(code: str, tests: Any, sandbox: Any = None, **options: Any) -> CodeVerdict:
    options.setdefault("limits", CodeLimits(timeout=20.0))
    return asyncio.run(run_code_tests(sandbox or ProcessSandbox(), code, tests, **options))


SUM = "print(int(input()) + int(input()))"
WRONG = [
    ("print(2)\nimport os; os.kill(os.getpid(), 9)", "exit code -9"),
    ("print(2, flush=True)\nwhile True: pass", "time limit"),
    ("print(2); print(3)", "wrong output"),
]


@pytest.mark.parametrize(("code", "reason"), WRONG, ids=[repr(code) for code, _ in WRONG])
def test_a_wrong_program_fails_with_its_reason(code: str, reason: str) -> None:
    limits = CodeLimits(timeout=1.0 if reason == "time limit" else 20.0)
    verdict = check(code, {"inputs": ["1"], "outputs": ["2"]}, limits=limits)
    assert (verdict.passed, verdict.results[0].reason) == (0, reason)


def test_no_program_passes_without_printing_the_answer() -> None:
    # It ends well and has printed anything but the answer, which no program can find where it runs.
    program = """
import atexit, gc, os, sys
atexit.register(os._exit, 0)
print("passed", 0, *os.environ.items(), *os.listdir("."), open("/proc/self/cmdline").read(), open(__file__).read())
print(sys.modules, gc.get_objects()[:100], sys._getframe().f_globals, "".join(map(chr, range(32, 127))))
"""
    verdict = check(program, {"inputs": ["20", "21"], "outputs": ["81549300", "81549301"]})
    assert (verdict.passed, verdict.score(), verdict.score(partial=False)) == (0, 0.0, 0.0)


class EchoSandbox(ProcessSandbox):
    """Gives stdin back, once as many runs have come as there can be at a time; fails where stdin is `gone`."""

    def __init__(self, together: int = 1) -> None:
        super().__init__()
        self.together, self.full, self.cancelled = together, asyncio.Event(), 0

    async def run_code(self, request: RunCodeRequest) -> RunCodeResponse:
        if request.stdin == "gone":
            return RunCodeResponse.model_validate({"status": "SandboxError", "message": "gone"})
        try:
            return await super().run_code(request)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def _run(self, request: RunCodeRequest, folder: Any) -> RunCodeResponse:
        if self.running == self.together:
            self.full.set()
        await self.full.wait()
        run = {"status": "Finished", "return_code": 0, "stdout": request.stdin}
        return RunCodeResponse.model_validate({"status": "Success", "run_result": run})


def test_runs_of_one_program_are_bounded_and_limited() -> None:
    sandbox, numbers = EchoSandbox(3), [str(i) for i in range(20)]
    limits = CodeLimits(timeout=3.0, memory_mb=99, concurrency=3)
    verdict = check("print('\ud800')", {"inputs": numbers, "outputs": numbers}, sandbox, limits=limits, language="cpp")
    assert (verdict.passed, sandbox.most, len(sandbox.requests)) == (20, 3, 20)
    request = sandbox.requests[7]
    assert (request.run_timeout, request.memory_limit_MB, request.language) == (3.0, 99, "cpp")
    assert (request.code, request.stdin, request.files) == ("print('?')", "7", {})  # and nothing of expected outputs


def test_nothing_more_is_run_once_all_or_nothing_is_decided_or_the_sandbox_fails() -> None:
    sandbox = EchoSandbox()
    tests = {"inputs": ["1", "2", "3", "4"], "outputs": ["1", "x", "3", "4"]}
    verdict = check("", tests, sandbox, limits=CodeLimits(concurrency=1), stop_at_failure=True)
    assert [result.passed for result in verdict.results] == [True, False, False, False]
    assert len(sandbox.requests) == 2
    assert verdict.results[3].reason.startswith("not run")
    sandbox = EchoSandbox(99)
    with pytest.raises(SandboxUnavailable, match="gone"):
        check("", {"inputs": ["1", "2", "gone"], "outputs": ["1", "2", "3"]}, sandbox)
    assert sandbox.cancelled == 2


@pytest.mark.parametrize(
    ("output", "expected", "exact", "tolerant"),
    [
        # White space at the end of lines does not count; anything else does.
        ("1  \n2\t\n\n\n", "1\n2", True, True),
        ("1\r\n2\r\n", "1\n2", True, True),
        ("1" + " " * 60_000, "1", True, True),
        ("1" + " " * 70_000, "1", False, False),
        ("1 2", "1\n2", False, False),
        ("1\n\n2", "1\n2", False, False),
        (" 1", "1", False, True),
        ("0.33333", "0.333333333", False, True),
        ("x = 1.0000001 ok", "x  =  1 ok", False, True),
        ("0.334", "0.333333", False, False),
        ("y = 1.0", "x = 1.0", False, False),
        ("inf", "Infinity", False, False),
        ("1000000000000000001", "1000000000000000000", False, False),
    ],
)
def test_outputs_are_compared_line_by_line_and_numbers_may_differ_by_the_tolerance(output, expected, exact, tolerant):
    assert same_output(output, expected) is exact
    assert same_output(output, expected, tolerance=1e-4) is tolerant


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        (None, "allowed: "),
        ([], "no statement"),
        (["assert f()"], "language = 'python'"),
        ("assert f( == 1", "allowed: "),
        ([{"input": "1", "output": "1", "testtype": "functional"}], "do not name it"),
        ({"fn_name": "f()", "inputs": [[1]], "outputs": [1]}, "not the name of a function"),
        ({"fn_name": "f", "inputs": [1], "outputs": [1]}, "not a list of arguments"),
        ({"fn_name": "f", "inputs": ["1, 2"], "outputs": ["1"]}, "are not JSON"),
        ("def check(candidate):\n    assert candidate(1)", "no statement that could fail"),
        ({"inputs": "12", "outputs": "24"}, "the same length"),
        (["assert f( == 1"], "is not Python"),
        (["import math", "x = 1", "def test(): assert f()"], "no statement that could fail"),
    ],
)
def test_tests_in_no_known_form_are_named(tests: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        check(DOUBLE, tests, language="cpp")
    assert len(str(caught.value)) < 400


# Tests in the forms of public data sets, with a right program and a wrong one.
ADD = "def add(a, b):\n    return a + b\n"
SOLUTION = "class Solution:\n    def add(self, a, b):\n        return a + b\n"
WRONG_ADD = "def add(a, b):\n    return a - b\n"
CALLS = {"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [3, 7]}
PAIRS = "def pairs(n):\n    return [(i, {i: None}) for i in range(n)]\n"
PAIRED = {"fn_name": "pairs", "inputs": [[2]], "outputs": [[[0, {"0": None}], [1, {"1": None}]]]}
LINES = {"fn_name": "add", "inputs": ["1\n2", '"a"\n"b"'], "outputs": ["3", '"ab"']}
FUNCTIONAL = {"input": "1\n2", "output": "3", "testtype": "functional", "metadata": {"func_name": "add"}}
NAMED_IN_TEXT = FUNCTIONAL | {"metadata": json.dumps(FUNCTIONAL["metadata"])}
CHECK = {"assertions": ["def check(f):\n    assert f(1, 2) == 3"], "entry_point": "add"}
FORMS = {
    "APPS, a function": (CALLS, ADD, WRONG_ADD),
    "APPS, a method": (json.dumps(CALLS), SOLUTION, SOLUTION.replace("+", "-")),
    "APPS, each output in a list": (CALLS | {"outputs": [[3], [7]]}, SOLUTION, WRONG_ADD),
    "tuples and keys that are numbers": (PAIRED, PAIRS, PAIRS.replace("range(n)", "range(n - 1)")),
    "LiveCodeBench, arguments in lines": (LINES, ADD, WRONG_ADD),
    "LiveCodeBench, the name in metadata": ([FUNCTIONAL], ADD, WRONG_ADD),
    "LiveCodeBench, the name in metadata as text": ([NAMED_IN_TEXT], ADD, WRONG_ADD),
    "LiveCodeBench, stdin": (json.dumps([{"input": "1\n2\n", "output": "3\n", "testtype": "stdin"}]), SUM, DOUBLE),
    "stdin as a list of lines": (json.dumps({"inputs": [["1", "2"], "3\n4"], "outputs": [["3"], 7]}), SUM, DOUBLE),
    "HumanEval, with the name": (CHECK, ADD, WRONG_ADD),
    "pytest": ("from solution import add\n\ndef test_a():\n    assert add(1, 2) == 3", ADD, WRONG_ADD),
    "pytest, a list": (["def test_a(): assert add(1, 2) == 3", "def test_b(): assert add(4, 3) == 7"], ADD, WRONG_ADD),
    "a list as Python writes it": ("['assert add(1, 2) == 3']", ADD, WRONG_ADD),
}


@pytest.mark.parametrize("form", FORMS)
def test_tests_are_read_as_public_data_sets_have_them(form: str) -> None:
    tests, right, wrong = FORMS[form]
    for code, score in ((right, 1.0), (wrong, 0.0)):
        verdict = check(code, tests)
        assert (verdict.score(), verdict.score(partial=False)) == (score, score)


@pytest.mark.parametrize(("tolerance", "passed"), [(None, 0), (1e-6, 2)])
def test_results_of_calls_may_differ_by_the_tolerance(tolerance: float | None, passed: int) -> None:
    halves = {"fn_name": "half", "inputs": [[1], [3]], "outputs": [0.5, 1.5]}
    assert check("def half(x): return x / 2 + 1e-7", halves, tolerance=tolerance).passed == passed


FENCED = "```python\nfirst\n```\ntext\n```python\nlast\n  indented\n```\nafter\n```\nplain\n```"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (FENCED, "last\n  indented"),
        ("```PYTHON\r\nx\r\n```\r\n", "x\r"),
        ("```python\nx\n```\n```python\ncut off", "x"),
        ("<code>a</code> and <code>\nb\n</code>", "\nb\n"),
        ("<code>a</code> <code>cut off", "a"),
        ("```cpp\nx\n```", "```cpp\nx\n```"),
        ("", ""),
    ],
)
def test_the_program_is_the_last_whole_block(text: str, code: str) -> None:
    assert extract_code(text) == code


DOUBLED = "Here it is:\n```python\nprint(2 * int(input()))\n```\nI hope it helps."
TWICE = "```python\ntwice = lambda x: 2 * x\n```"
STREAMS = {"inputs": ["1", "2\n", "3", "4"], "outputs": ["2\n", "4", "6", "9"]}
COLUMN = {"tests": ["assert twice(2) == 4", "assert twice(3) == 7"]}


def score(text: str, answer: Any, options: dict[str, Any], sandbox: ProcessSandbox) -> float:
    return asyncio.run(Code(sandbox, **options).score(Outcome(text, answer=answer, row=COLUMN)))


@pytest.mark.parametrize(
    ("text", "answer", "options", "expected"),
    [
        (DOUBLED, STREAMS, {}, 0.75),
        (DOUBLED, STREAMS, {"partial": False}, 0),
        (TWICE, "unused", {"tests": "tests"}, 0.5),
        ("", STREAMS, {}, 0),
    ],
)
def test_the_reward_is_the_share_of_tests_or_all(text: str, answer: Any, options: Any, expected: float) -> None:
    sandbox = ProcessSandbox()
    assert score(text, answer, options, sandbox) == expected
    assert bool(sandbox.requests) == bool(text), "without a program nothing is run"
    with pytest.raises(ValueError, match="no column 'other'"):
        score(text, answer, {"tests": "other"}, sandbox)
    with pytest.raises(ValueError, match="tests"):
        score(text, "4", {}, sandbox)


@pytest.mark.parametrize("piece", ["```python\n", "<code>", "</code>", "```", "`", "\n", "<code>x</code>", " \t"])
def test_megabytes_of_tags_are_read_once(piece: str) -> None:
    text = piece * (4_000_000 // len(piece))
    assert len(extract_code(text)) <= len(text)
