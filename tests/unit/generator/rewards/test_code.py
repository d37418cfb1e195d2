"""How a program's tests are read, and what is refused before any program runs."""

from __future__ import annotations

import asyncio
import json
import warnings
from typing import Any

import pytest

from generator.rewards.code.plans import Assertions, read_tests
from generator.rewards.code.unit_tests import run_code_tests
from sandbox_client import (
    CommandRunResult,
    CommandStatus,
    RunCodeRequest,
    RunCodeResponse,
    SandboxUnavailable,
    Status,
)

CHECK = "def check(candidate):\n    assert candidate(1) == 2"


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ({"fn_name": "None", "inputs": [[1]], "outputs": [1]}, "fn_name = 'None' is not the name of a function"),
        ({"fn_name": "class", "inputs": [[1]], "outputs": [1]}, "fn_name = 'class' is not the name of a function"),
        ("{'fn_name': 'f', 'inputs': [[{1, 2}]], 'outputs': [3]}", "of a call cannot be JSON .*set"),
        ("{'fn_name': 'f', 'inputs': [[1]], 'outputs': [{(1, 2): 3}]}", "of a call cannot be JSON .*tuple"),
        ({"fn_name": "f", "inputs": ["[" * 100_000], "outputs": ["1"]}, "are not JSON"),
        ("{[1]: 2}", "allowed: "),
        (["assert f() == 1", "return 5"], "'return 5' is not Python"),
        (["assert await f() == 1"], "is not Python"),
        ({"assertions": [CHECK], "entry_point": "f g"}, "entry_point = 'f g' is not the name of a function"),
        ({"assertions": [CHECK], "entry_point": "None"}, "entry_point = 'None' is not the name"),
        ({"assertions": [CHECK], "entry_point": 5}, "entry_point = 5 is not the name"),
    ],
)
def test_tests_that_no_program_could_pass_are_named(tests: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        read_tests(tests)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("entry_point", ["f", "Solution().f"])
def test_an_entry_point_may_be_a_method(entry_point: str) -> None:
    plan = read_tests({"assertions": [CHECK], "entry_point": entry_point})
    assert isinstance(plan, Assertions)
    assert plan.statements == [(CHECK, False), (f"check({entry_point})", True)]


def test_what_python_warns_of_is_no_news() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_tests(["assert (f() == 1, 'one')"]).statements == [("assert (f() == 1, 'one')", True)]


class SomeVerdicts:
    """A sandbox whose answer holds the harness's lines on some tests only."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = numbers

    async def run_code(self, request: RunCodeRequest) -> RunCodeResponse:
        assert request.stdin is not None
        nonce = json.loads(request.stdin)["nonce"]
        lines = ["ready", *(f"{number} passed " for number in self.numbers)]
        stdout = "".join(f"\n{nonce} {line}\n" for line in lines)
        ran = CommandRunResult(status=CommandStatus.FINISHED, return_code=0, stdout=stdout)
        return RunCodeResponse(status=Status.SUCCESS, run_result=ran)

    async def close(self) -> None: ...


def test_a_verdict_of_which_the_sandbox_left_out_a_part_is_none() -> None:
    tests = [f"assert f({number})" for number in range(4)]
    assert asyncio.run(run_code_tests(SomeVerdicts(0, 1), "", tests)).passed == 2, "it ended after the second test"
    with pytest.raises(SandboxUnavailable, match="left out"):
        asyncio.run(run_code_tests(SomeVerdicts(0, 3), "", tests))
