"""Code tests in real isolation, through `spo-sandbox`."""

from __future__ import annotations

import pytest

from generator.rewards.code.unit_tests import CodeLimits, run_code_tests
from tests.support.code_attacks import ANSWER, ATTACKS, TESTS
from tests.support.sandbox import SandboxUnderTest

pytestmark = pytest.mark.usefixtures("bubblewrap")

PROGRAMS = {
    name: ATTACKS[name]
    for name in (
        "reads what it finds",
        "searches the memory of the judge",
        "attaches to the judge",
        "writes a verdict to the judge's stdout",
        "interrupts the judge",
        "puts modules where imports look",
    )
} | {"right": f"def f(x): return {ANSWER}"}


@pytest.mark.parametrize("name", PROGRAMS)
def test_only_the_right_program_passes(http: SandboxUnderTest, name: str) -> None:
    limits = CodeLimits(timeout=10.0, longest_run=30.0, memory_mb=512)
    verdict = http.loop.run(run_code_tests(http.sandbox, PROGRAMS[name], TESTS, limits=limits))
    assert (verdict.passed, verdict.total) == (len(TESTS) if name == "right" else 0, len(TESTS))
