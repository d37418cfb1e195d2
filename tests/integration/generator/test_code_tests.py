"""Programs tested by stdin and stdout, what counts as the same output, and where in an answer the program is."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from generator.rewards.code.unit_tests import CodeLimits, CodeVerdict, extract_code, run_code_tests, same_output
from sandbox_client import RunCodeRequest, RunCodeResponse, SandboxUnavailable
from tests.support.process_sandbox import ProcessSandbox

DOUBLE = "print(2 * int(input()))"
PATIENT = CodeLimits(timeout=20.0)


def check(code: str, tests: Any, sandbox: Any = None, **options: Any) -> CodeVerdict:
    options.setdefault("limits", PATIENT)
    return asyncio.run(run_code_tests(sandbox or ProcessSandbox(), code, tests, **options))


def test_partial_credit_is_the_share_of_tests_that_passed() -> None:
    verdict = check(DOUBLE, {"inputs": ["1", "2\n", "3"], "outputs": ["2\n", "4", "7"]})
    assert [result.passed for result in verdict.results] == [True, True, False]
    assert (verdict.passed, verdict.total, verdict.results[2].reason) == (2, 3, "wrong output")
    assert verdict.score() == pytest.approx(2 / 3)
    assert verdict.score(partial=False) == 0.0


def test_tests_may_be_json_text_and_lists_of_lines() -> None:
    tests = {"inputs": [["1", "2"], "3\n4"], "outputs": [["3"], 7]}
    verdict = check("print(int(input()) + int(input()))", json.dumps(tests))
    assert (verdict.passed, verdict.score(partial=False)) == (2, 1.0)


WRONG = [
    ("print(2); raise SystemExit(1)", "exit code 1"),
    ("print(2); 1 / 0", "exit code 1"),
    ("print(2)\nimport os; os.kill(os.getpid(), 9)", "exit code -9"),
    ("print(2, flush=True)\nwhile True: pass", "time limit"),
    ("print(2); print(3)", "wrong output"),
    ("print('passed')", "wrong output"),
    ("import os; os._exit(0)", "wrong output"),
    ("print('2' * (1 << 20))", "wrong output"),
    ("print('2)", "exit code 1"),
]


@pytest.mark.parametrize("case", WRONG, ids=[repr(case[0]) for case in WRONG])
def test_a_wrong_program_fails_with_its_reason(case: tuple[str, str]) -> None:
    limits = CodeLimits(timeout=1.0 if case[1] == "time limit" else 20.0)
    verdict = check(case[0], {"inputs": ["1"], "outputs": ["2"]}, limits=limits)
    assert (verdict.passed, verdict.results[0].reason) == (0, case[1])


def test_expected_outputs_never_enter_the_sandbox() -> None:
    sandbox = ProcessSandbox()
    check(DOUBLE, {"inputs": ["1"], "outputs": ["81549300"]}, sandbox)
    (request,) = sandbox.requests
    assert (request.code, request.stdin) == (DOUBLE, "1")
    assert "81549300" not in request.model_dump_json()


class Slow(ProcessSandbox):
    """Holds every run until as many have come as there can be at a time."""

    def __init__(self, together: int) -> None:
        super().__init__()
        self.together, self.full = together, asyncio.Event()

    async def _run(self, request: RunCodeRequest, folder: Any) -> RunCodeResponse:
        if self.running == self.together:
            self.full.set()
        await self.full.wait()
        run = {"status": "Finished", "return_code": 0, "stdout": request.stdin}
        return RunCodeResponse.model_validate({"status": "Success", "run_result": run})


def test_runs_of_one_program_are_bounded() -> None:
    sandbox = Slow(3)
    numbers = [str(i) for i in range(20)]
    verdict = check("", {"inputs": numbers, "outputs": numbers}, sandbox, limits=CodeLimits(concurrency=3))
    assert (verdict.passed, sandbox.most, len(sandbox.requests)) == (20, 3, 20)


def test_limits_reach_the_sandbox() -> None:
    sandbox = Slow(1)
    check("x", {"inputs": [""], "outputs": [""]}, sandbox, limits=CodeLimits(timeout=3.0, memory_mb=99), language="cpp")
    (request,) = sandbox.requests
    assert (request.run_timeout, request.memory_limit_MB, request.language) == (3.0, 99, "cpp")


def test_nothing_more_is_run_once_all_or_nothing_is_decided() -> None:
    sandbox = Slow(1)
    tests = {"inputs": ["1", "2", "3", "4"], "outputs": ["1", "x", "3", "4"]}
    verdict = check("", tests, sandbox, limits=CodeLimits(concurrency=1), stop_at_failure=True)
    assert [result.passed for result in verdict.results] == [True, False, False, False]
    assert len(sandbox.requests) == 2
    assert verdict.results[3].reason.startswith("not run")


class Failing(ProcessSandbox):
    """Fails at the second run, one way or the other, while others are under way."""

    def __init__(self, raises: bool) -> None:
        super().__init__()
        self.raises, self.cancelled = raises, 0

    async def run_code(self, request: RunCodeRequest) -> RunCodeResponse:
        self.requests.append(request)
        if len(self.requests) == 2:
            if self.raises:
                raise SandboxUnavailable("gone")
            return RunCodeResponse.model_validate({"status": "SandboxError", "message": "gone"})
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled += 1
        raise AssertionError


@pytest.mark.parametrize("raises", [True, False])
def test_a_failing_sandbox_is_no_verdict_and_leaves_no_run_behind(raises: bool) -> None:
    async def test() -> None:
        sandbox = Failing(raises)
        tests = {"inputs": ["1"] * 9, "outputs": ["2"] * 9}
        with pytest.raises(SandboxUnavailable, match="gone"):
            await run_code_tests(sandbox, DOUBLE, tests, limits=CodeLimits(concurrency=4))
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert sandbox.cancelled == len(sandbox.requests) - 1

    asyncio.run(test())


SAME = [
    ("1\n2\n", "1\n2"),
    ("1  \n2\t\n\n\n", "1\n2"),
    ("1\r\n2\r\n", "1\n2"),
    ("", "\n"),
    ("\n1", "\n1"),
]
DIFFERENT = [("1 2", "1\n2"), (" 1", "1"), ("1  2", "1 2"), ("", "0"), ("1\n\n2", "1\n2"), ("1.0", "1"), ("a", "A")]


@pytest.mark.parametrize("pair", SAME)
def test_white_space_at_the_end_of_lines_does_not_count(pair: tuple[str, str]) -> None:
    assert same_output(*pair)


@pytest.mark.parametrize("pair", DIFFERENT)
def test_anything_else_does(pair: tuple[str, str]) -> None:
    assert not same_output(*pair)


@pytest.mark.parametrize(
    ("output", "expected", "same"),
    [
        ("0.33333", "0.333333333", True),
        ("x = 1.0000001 ok", "x  =  1 ok", True),
        ("1e-9", "0", True),
        ("1e3", "1000", True),
        ("0.334", "0.333333", False),
        ("1 2", "1", False),
        ("y = 1.0", "x = 1.0", False),
        ("1000000000000000001", "1000000000000000000", False),
        ("1" * 400, "2" * 400, False),
        ("inf", "Infinity", False),
        ("nan", "nan", True),
        ("nan", "1", False),
        ("1\n2.0", "1.0\n2", True),
    ],
)
def test_numbers_may_differ_by_the_tolerance(output: str, expected: str, same: bool) -> None:
    assert same_output(output, expected, tolerance=1e-4) is same
    assert not same_output(output, expected) or output == expected


def test_an_output_far_too_long_is_not_looked_at() -> None:
    assert same_output("1" + " " * 60_000, "1")
    assert not same_output("1" + " " * 70_000, "1")


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        (None, "allowed: "),
        ([], "no statement"),
        ([1], "allowed: "),
        ("not json", "not JSON"),
        ({}, "allowed: "),
        ({"inputs": ["1"], "outputs": []}, "one length"),
        ({"inputs": [], "outputs": []}, "one length"),
        ({"inputs": "12", "outputs": "24"}, "one length"),
        ({"assertions": "assert f()"}, "allowed: "),
        (["assert f( == 1"], "is not Python"),
        (["import math", "x = 1", "def test(): assert f()"], "no statement that could fail"),
    ],
)
def test_tests_in_no_known_form_are_named(tests: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        check(DOUBLE, tests)
    assert len(str(caught.value)) < 400


def test_assertions_are_python() -> None:
    with pytest.raises(ValueError, match="language = 'python'"):
        check(DOUBLE, ["assert f()"], language="cpp")


FENCED = "```python\nfirst\n```\ntext\n```python\nlast\n  indented\n```\nafter\n```\nplain\n```"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (FENCED, "last\n  indented"),
        ("a ```Python3 \nx\n```", "a ```Python3 \nx\n```"),
        ("```py\nx\n```", "x"),
        ("```PYTHON\r\nx\r\n```\r\n", "x\r"),
        ("```python\n    x\n\n```", "    x"),
        ("```python\n```", ""),
        ("```python\nx\n```\n```python\ncut off", "x"),
        ("<code>a</code> and <code>\nb\n</code>", "\nb\n"),
        ("<code>a</code>\n```python\nb\n```", "b"),
        ("<code>a</code> <code>cut off", "a"),
        ("</code> x", "</code> x"),
        ("print(1)", "print(1)"),
        ("```cpp\nx\n```", "```cpp\nx\n```"),
        ("", ""),
    ],
)
def test_the_program_is_the_last_whole_block(text: str, code: str) -> None:
    assert extract_code(text) == code


@pytest.mark.parametrize("piece", ["```python\n", "<code>", "</code>", "```", "`", "\n", "<code>x</code>", " \t"])
def test_megabytes_of_tags_are_read_once(piece: str) -> None:
    text = piece * (4_000_000 // len(piece))
    assert len(extract_code(text)) <= len(text)


def test_half_a_surrogate_pair_is_sent_as_a_question_mark() -> None:
    sandbox = Slow(1)
    check("print('\ud800')", {"inputs": ["\udfff"], "outputs": ["?"]}, sandbox)
    assert (sandbox.requests[0].code, sandbox.requests[0].stdin) == ("print('?')", "?")
