"""Programs as rewards: where the tests come from, partial credit, and a sandbox that fails."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from generator.rewards.code.reward import Code
from generator.rewards.outcome import Outcome
from sandbox_client import RunCodeRequest, RunCodeResponse, SandboxUnavailable
from tests.support.process_sandbox import ProcessSandbox

DOUBLED = "Here it is:\n```python\nprint(2 * int(input()))\n```\nI hope it helps."
STREAMS = {"inputs": ["1", "2", "3", "4"], "outputs": ["2", "4", "6", "9"]}


def score(text: str, answer: Any = None, row: dict[str, Any] | None = None, **options: Any) -> float:
    return asyncio.run(Code(ProcessSandbox(), **options).score(Outcome(text, answer=answer, row=row or {})))


def test_the_share_of_tests_passed_or_all_of_them() -> None:
    assert score(DOUBLED, STREAMS) == 0.75
    assert score(DOUBLED, STREAMS, partial=False) == 0
    assert score(DOUBLED, {"inputs": ["1"], "outputs": ["2"]}, partial=False) == 1


def test_tests_from_a_column_and_as_assertions() -> None:
    tests = ["assert twice(2) == 4", "assert twice(3) == 7"]
    assert score("```python\ntwice = lambda x: 2 * x\n```", "unused", {"tests": tests}, tests="tests") == 0.5


def test_an_answer_without_a_program_passes_no_test_and_needs_no_sandbox() -> None:
    sandbox = ProcessSandbox()
    assert asyncio.run(Code(sandbox).score(Outcome("", answer=STREAMS))) == 0
    assert sandbox.requests == []


def test_a_row_without_tests_is_an_error_not_a_zero() -> None:
    with pytest.raises(ValueError, match="no column 'tests'"):
        score(DOUBLED, "4", tests="tests")
    with pytest.raises(ValueError, match="tests"):
        score(DOUBLED, "4")


class Away(ProcessSandbox):
    async def run_code(self, request: RunCodeRequest) -> RunCodeResponse:
        raise SandboxUnavailable("nobody there")


def test_a_sandbox_that_fails_is_an_error_not_a_zero() -> None:
    with pytest.raises(SandboxUnavailable):
        asyncio.run(Code(Away()).score(Outcome(DOUBLED, answer=STREAMS)))
