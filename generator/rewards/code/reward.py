"""Programs, scored by the tests they pass."""

from __future__ import annotations

import functools
import math
from typing import Any

from common.errors import UserError
from generator.concurrency import LONG_TEXT, offload
from generator.rewards.code.plans import read_tests
from generator.rewards.code.unit_tests import CodeLimits, extract_code, run_code_tests
from generator.rewards.outcome import Outcome
from generator.rewards.registry import Builtin
from sandbox_client import Sandbox


class Code(Builtin):
    """The share of tests that the program in the last turn passes; 0 if there is no program.

    The program is the last closed ```python block, else the last <code> element, else all of the turn. The forms of
    tests are those of `run_code_tests`: stdin and stdout, or assertions.

    Args:
        sandbox: where programs run.
        tests: column of the data row that holds the tests; by default the reference answer does.
        partial: if false, the score is 1 if all tests pass, else 0.
        language: of the program.
        tolerance: numbers in outputs may differ by this, relative or absolute.
        timeout: seconds that a test may take.
        memory_mb: memory of a test in MiB.
        concurrency: number of tests of one program that run at a time.

    Raises:
        SandboxUnavailable: by `score`, if the sandbox fails; that says nothing about the program.
        ValueError: by `score`, if the row has no tests, or none in a known form.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        tests: str | None = None,
        partial: bool = True,
        language: str = "python",
        tolerance: float | None = None,
        timeout: float = 10.0,
        memory_mb: int = 1024,
        concurrency: int = 8,
    ) -> None:
        if not timeout > 0 or memory_mb < 1 or concurrency < 1:
            raise UserError(f"{timeout = }, {memory_mb = } and {concurrency = } must be above 0")
        if tolerance is not None and not 0 <= tolerance < math.inf:
            raise UserError(f"{tolerance = } must be a finite number of at least 0")
        self._tests, self._partial = tests, partial
        self._run = functools.partial(
            run_code_tests,
            sandbox,
            language=language,
            tolerance=tolerance,
            stop_at_failure=not partial,
            limits=CodeLimits(timeout, memory_mb, concurrency),
        )

    async def score(self, outcome: Outcome) -> float:
        if self._tests is not None and self._tests not in outcome.row:
            raise ValueError(f"the data row has no column {self._tests!r} with tests")
        tests: Any = outcome.answer if self._tests is None else outcome.row[self._tests]
        code = await offload(len(outcome.text) > LONG_TEXT, extract_code, outcome.text)
        if not code.strip():
            read_tests(tests)  # a row without tests is an error, whatever the answer
            return 0.0
        return (await self._run(code, tests)).score(self._partial)
