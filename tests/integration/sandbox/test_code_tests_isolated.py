"""Code tests in real isolation: in the local sandbox, and through `spo-sandbox` over HTTP."""

from __future__ import annotations

import asyncio

import pytest

from generator.rewards.code.unit_tests import CodeLimits, run_code_tests
from sandbox_client import RunCodeRequest, RunCodeResponse
from tests.support.code_attacks import ATTACKS, TESTS
from tests.support.code_meanings import MEANINGS, parts
from tests.support.sandbox import SandboxUnderTest

pytestmark = pytest.mark.usefixtures("bubblewrap")

LIMITS = CodeLimits(timeout=10.0, longest_run=30.0, memory_mb=512)


class Isolated:
    """The sandbox of a fixture, which lives in a loop of its own."""

    def __init__(self, runner: SandboxUnderTest) -> None:
        self.runner = runner

    async def run_code(self, request: RunCodeRequest) -> RunCodeResponse:
        return await asyncio.to_thread(self.runner.run, request)

    async def close(self) -> None: ...


@pytest.fixture
def isolated(runner: SandboxUnderTest) -> Isolated:
    return Isolated(runner)


@pytest.mark.parametrize("meaning", MEANINGS)
def test_right_programs_pass(isolated: Isolated, meaning: str) -> None:
    program, tests = parts(MEANINGS[meaning])
    verdict = asyncio.run(run_code_tests(isolated, program, tests, limits=LIMITS))
    assert verdict.passed == verdict.total, [result for result in verdict.results if not result.passed]


@pytest.mark.parametrize(
    "attack",
    [
        "reads what it finds",
        "searches the memory of the judge",
        "attaches to the judge",
        "writes a verdict to the judge's stdout",
        "kills the judge when asked",
        "puts modules where imports look",
    ],
)
def test_programs_that_attack_the_judge_fail(isolated: Isolated, attack: str) -> None:
    verdict = asyncio.run(run_code_tests(isolated, ATTACKS[attack], TESTS, limits=LIMITS))
    assert (verdict.passed, verdict.total) == (0, len(TESTS))


def test_outputs_are_compared(isolated: Isolated) -> None:
    tests = {"inputs": ["1", "2", "x"], "outputs": ["2", "5", ""]}
    verdict = asyncio.run(run_code_tests(isolated, "print(2 * int(input()))", tests, limits=LIMITS))
    assert [result.reason for result in verdict.results] == ["", "wrong output", "exit code 1"]
