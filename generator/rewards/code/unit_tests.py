"""Runs the tests of a model-written program in a sandbox, and returns which of them passed.

Expected values never reach the program's process: outputs are compared here, assertions run in a process of their own
(`generator.rewards.code.harness`). docs/rewards.md says what that protects from, and what not.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from generator.rewards.code.plans import Assertions, Streams, read_tests
from sandbox_client import CommandStatus, RunCodeRequest, RunCodeResponse, Sandbox, SandboxUnavailable, Status

_PARTS = {
    f"generator.rewards.code.{name}": Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
    for name in ("peer", "harness")
}
# The harness as one program; `TEXT` is the program's own text, from which the harness starts its other process.
_TEXT = f"""import sys, types
PARTS = {_PARTS!r}
for name in PARTS:
    sys.modules[name] = types.ModuleType(name)
for name, part in PARTS.items():
    exec(compile(part, name, "exec"), vars(sys.modules[name]))
sys.modules["generator.rewards.code.harness"].main(TEXT)
"""
HARNESS = f"TEXT = {_TEXT!r}\nexec(TEXT)\n"
START_SECONDS = 10.0  # for the harness to start and to write its verdict

# A line with a fence only: an opening one with its language, or a closing one, whose group 1 is empty.
_FENCE = re.compile(r"^[ \t]{0,3}```(python3?|py|)[ \t\r]*$", re.IGNORECASE | re.MULTILINE)


@dataclass(frozen=True)
class CaseResult:
    """One test: whether it passed, and if not, why."""

    passed: bool
    reason: str = ""


@dataclass(frozen=True)
class CodeVerdict:
    """All tests of a program, in their order."""

    passed: int
    total: int
    results: list[CaseResult]

    def score(self, partial: bool = True) -> float:
        """In [0, 1]: the share that passed, or without `partial` 1 only if all did."""
        return self.passed / self.total if partial else float(self.passed == self.total)


@dataclass(frozen=True)
class CodeLimits:
    """Limits of a program: seconds per test, MiB, and runs of one program at a time."""

    timeout: float = 10.0
    memory_mb: int = 1024
    concurrency: int = 8
    # Longest run of a sandbox that checks many assertions, in seconds.
    longest_run: float = 60.0


@dataclass
class _Run:
    """One program, and how its tests are run."""

    sandbox: Sandbox
    code: str
    language: str
    tolerance: float | None
    stop_at_failure: bool
    limits: CodeLimits

    async def run(self, code: str, language: str, stdin: str, seconds: float) -> RunCodeResponse:
        request = RunCodeRequest(
            code=code,
            language=language,
            stdin=stdin,
            run_timeout=seconds,
            memory_limit_MB=self.limits.memory_mb,
        )
        answer = await self.sandbox.run_code(request)
        if answer.status is Status.SANDBOX_ERROR:
            raise SandboxUnavailable(f"the sandbox failed: {answer.message[:300]}")
        return answer

    async def streams(self, plan: Streams) -> list[CaseResult]:
        slots = asyncio.Semaphore(self.limits.concurrency)
        failed = False

        async def check(stdin: str, expected: str) -> CaseResult:
            nonlocal failed
            async with slots:
                if failed and self.stop_at_failure:
                    return CaseResult(False, "not run: another test failed")
                answer = await self.run(self.code, self.language, stdin, self.limits.timeout)
            result = _compared(answer, expected, self.tolerance)
            failed = failed or not result.passed
            return result

        runs = [asyncio.create_task(check(stdin, expected)) for stdin, expected in plan.pairs]
        try:
            return await asyncio.gather(*runs)
        finally:
            for run in runs:
                run.cancel()
            await asyncio.gather(*runs, return_exceptions=True)

    async def assertions(self, plan: Assertions) -> list[CaseResult]:
        nonce = secrets.token_hex(16)
        seconds = min(self.limits.longest_run, self.limits.timeout * (len(plan.statements) + 1) + START_SECONDS)
        job = {
            "nonce": nonce,
            "code": self.code,
            "tests": plan.statements,
            "timeout": self.limits.timeout,
            "seconds": max(seconds - START_SECONDS, seconds / 2),
            "entry_point": plan.entry_point,
        }
        answer = await self.run(HARNESS, "python", json.dumps(job), seconds)
        run = answer.run_result
        stdout, stderr = (run.stdout or "", run.stderr or "") if run else ("", "")
        too_slow = run is not None and run.status is CommandStatus.TIME_LIMIT_EXCEEDED
        lines = [line[len(nonce) + 1 :] for line in stdout.split("\n") if line.startswith(f"{nonce} ")]
        if "ready" not in lines:
            # The program was not even sent to its process.
            message = " ".join(stderr.split())[-300:] or "(no message)"
            raise SandboxUnavailable(f"the test harness did not start in the sandbox: {message}")
        verdicts = {number: (word, reason) for number, word, reason in (f"{line}  ".split(" ", 2) for line in lines)}
        known = [str(number) in verdicts for number, (_, counts) in enumerate(plan.statements) if counts]
        if known != sorted(known, reverse=True):  # the harness reports one test after the other
            raise SandboxUnavailable("the sandbox left out a part of what the test harness wrote")
        not_run = ("failed", "time limit" if too_slow else "not run: the sandbox ended")
        results = []
        for number, (_, counts) in enumerate(plan.statements):
            word, reason = verdicts.get(str(number), not_run)
            if counts:
                results.append(CaseResult(word == "passed", reason.strip()))
        return results


async def run_code_tests(
    sandbox: Sandbox,
    code: str,
    tests: Any,
    *,
    language: str = "python",
    tolerance: float | None = None,
    stop_at_failure: bool = False,
    limits: CodeLimits | None = None,
) -> CodeVerdict:
    """Run a program's tests.

    Args:
        tests: `{"inputs": [...], "outputs": [...]}`, or a list of `{"input": ..., "output": ...}`: one run each, stdout
            compared line by line without trailing white space. With `fn_name`, or `testtype: functional`: calls of
            this function or of the method of the class `Solution`. Or `{"assertions": [...], "entry_point": name}` or
            a plain list: Python statements run in one sandbox after the code, of which imports, definitions and
            assignments do not count, and test functions are called. Or any of these as text, in JSON or in Python.
            `entry_point` (optional) is a name that the program defines even if a builtin has it too.
        tolerance: numbers in outputs may differ by this, relative or absolute; if None, outputs are text.
        stop_at_failure: start no more runs once a test has failed.

    Raises:
        SandboxUnavailable: the sandbox failed, so there is no verdict.
        ValueError: the tests are in no known form.
    """
    plan = read_tests(tests, tolerance)
    # An unpaired surrogate cannot be sent; in a program it is an error anyway.
    code = code.encode("utf-8", "replace").decode()
    run = _Run(sandbox, code, language, tolerance, stop_at_failure, limits or CodeLimits())
    if isinstance(plan, Streams):
        results = await run.streams(plan)
    elif language != "python":
        raise ValueError(f"tests = assertions need language = 'python' (got {language!r})")
    else:
        results = await run.assertions(plan)
    return CodeVerdict(sum(check.passed for check in results), len(results), results)


def extract_code(text: str) -> str:
    """The program in an answer: the last closed ```python block, else the last <code> element, else all of it."""
    start, block = -1, None
    for fence in _FENCE.finditer(text):
        if start < 0 and fence[1]:
            start = fence.end()
        elif start >= 0 and not fence[1]:
            block, start = text[start : fence.start()].strip("\n"), -1
    if block is not None:
        return block
    end = text.rfind("</code>")
    start = text.rfind("<code>", 0, max(end, 0))
    return text[start + len("<code>") : end] if start >= 0 else text


def _compared(answer: RunCodeResponse, expected: str, tolerance: float | None) -> CaseResult:
    """Whether a run passes its test."""
    run = answer.run_result
    if run is None:
        return CaseResult(False, "does not compile")
    if run.status is CommandStatus.TIME_LIMIT_EXCEEDED:
        return CaseResult(False, "time limit")
    if answer.status is not Status.SUCCESS or run.status is not CommandStatus.FINISHED or run.return_code:
        return CaseResult(False, f"exit code {run.return_code}")
    passed = same_output(run.stdout or "", expected, tolerance)
    return CaseResult(passed, "" if passed else "wrong output")


SLACK = 64 << 10  # characters by which an output may exceed twice the expected one and still be compared


def same_output(output: str, expected: str, tolerance: float | None = None) -> bool:
    """Compare two outputs, ignoring trailing white space of lines and empty lines at the end."""
    if len(output) > 2 * len(expected) + SLACK:
        return False
    lines, expected_lines = (text.rstrip().split("\n") for text in (output, expected))
    return len(lines) == len(expected_lines) and all(
        a.rstrip() == b.rstrip() or (tolerance is not None and _same_numbers(a, b, tolerance))
        for a, b in zip(lines, expected_lines, strict=True)
    )


def _same_numbers(a: str, b: str, tolerance: float) -> bool:
    words, expected_words = a.split(), b.split()
    return len(words) == len(expected_words) and all(
        x == y or _close(x, y, tolerance) for x, y in zip(words, expected_words, strict=True)
    )


def _close(a: str, b: str, tolerance: float) -> bool:
    try:
        x, y = float(a), float(b)
    except ValueError:
        return False
    # Integers are exact: the tolerance is for rounding.
    if not (math.isfinite(x) and math.isfinite(y)) or (_is_integer(a) and _is_integer(b)):
        return False
    return math.isclose(x, y, rel_tol=tolerance, abs_tol=tolerance)


def _is_integer(text: str) -> bool:
    return text.lstrip("+-").isdigit()
