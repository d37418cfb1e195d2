"""Rewards by libraries that compare answers, within a limit of processor time: maths and reasoning-gym."""

from __future__ import annotations

import json
import logging
import math
import re
import signal
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from common.errors import UserError
from common.gym_families import installed_families, score_answer
from generator.rewards.outcome import Outcome
from generator.rewards.quantities import plain
from generator.rewards.registry import Builtin
from generator.rewards.rules import compiled, last_boxed

T = TypeVar("T")

TAIL = 10_000  # characters at the end of the last turn that are searched for an answer
DELIMITERS = ("$", "\\(", "\\[", "\\boxed")
PERCENT = re.compile(r"(?<=\d)\s*\\?%(?=\}?$)")
ELEMENT = r"<answer>(.*?)</answer>"


class _Expired(BaseException):
    """Derived from BaseException, because sympy, math-verify and reasoning-gym catch every Exception."""


def cpu_limit(seconds: float, work: Callable[[], T]) -> T | None:
    """Result of `work`; None if it takes more than `seconds` of processor time. For the main thread only."""

    def expire(*_: object) -> NoReturn:
        raise _Expired

    value = None
    before = signal.signal(signal.SIGPROF, expire)
    try:
        try:
            # The signal is repeated, since a bare `except` in the library may swallow one.
            signal.setitimer(signal.ITIMER_PROF, seconds, 0.5)
            value = work()
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)  # a last signal may interrupt this call
    except _Expired:
        signal.setitimer(signal.ITIMER_PROF, 0)
    finally:
        signal.signal(signal.SIGPROF, before)
    return value


def _check_seconds(seconds: float) -> None:
    if not 0 < seconds < math.inf:
        raise UserError(f"seconds = {seconds} must be above 0 and finite")


class Maths(Builtin):
    r"""1 if the last turn's answer equals the reference answer as mathematics (1/2, 0.5, \frac12); else 0.

    The answer is the last \boxed{}, else the last formula or number that math-verify finds. A unit that only one of the
    two has is ignored; two different ones differ. An answer that takes longer than `seconds` of processor time to
    compare (9^{9^{9^9}}) counts as wrong: what the model wrote must not look like a failure of the infrastructure.

    Args:
        seconds: processor time for one comparison; independent of how busy the machine is.
        digits: decimals that numbers are rounded to.
        strict: tell variables apart by name, and sets from tuples.

    Raises:
        ValueError: by `score`, if the reference answer itself is not mathematics.
    """

    in_pool = True

    def __init__(self, seconds: float = 5.0, digits: int = 6, strict: bool = True) -> None:
        _check_seconds(seconds)
        try:
            import math_verify
        except ImportError:
            raise UserError("the math-verify package is missing; pip install 'spo-trainer[generator]'") from None
        logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own timeouts are off
        self._library: Any = math_verify
        self._seconds, self._digits, self._strict = seconds, digits, strict

    def score(self, outcome: Outcome) -> float:
        return float(self._compare(outcome)[0])

    def answer(self, outcome: Outcome) -> str:
        """Right answers vote together, however they are written; wrong ones vote as they are written."""
        equal, text = self._compare(outcome)
        return outcome.answer_text if equal else text

    def _compare(self, outcome: Outcome) -> tuple[bool, str]:
        """Return whether the answer is right, and its text, which is empty if there is none."""
        truth, unit = cpu_limit(self._seconds, lambda: plain(outcome.answer_text)) or ("", "")
        if not any(mark in truth for mark in DELIMITERS):
            truth = f"\\boxed{{{truth}}}"
        gold = cpu_limit(self._seconds, lambda: self._parse(truth))
        if not gold:
            raise ValueError(f"the reference answer {outcome.answer_text[:200]!r} is not mathematics")
        text = outcome.text[-TAIL:]
        # The library would combine all boxes in a line into a set, even if the last one corrects the others.
        box = last_boxed(text)
        parsed: list[Any] = []

        def verify() -> Any:
            written = text
            if box is not None:
                number, its_unit = plain(box)
                if unit and its_unit and its_unit != unit:
                    return False
                written = f"\\boxed{{{number}}}"
            parsed.extend(self._parse(written))
            golds, answers = [*gold], [*parsed]
            # The library accepts 5% for 5, but not 12.5% for 12.5.
            if PERCENT.search(truth) and "%" not in written:
                golds += self._parse(PERCENT.sub("", truth))
            elif "%" not in truth and PERCENT.search(written):
                answers += self._parse(PERCENT.sub("", written))
            return self._library.verify(
                golds, answers, float_rounding=self._digits, strict=self._strict, timeout_seconds=None
            )

        equal = cpu_limit(self._seconds, verify)
        return bool(equal), str(parsed[-1] if parsed else "") if box is None else box

    def _parse(self, text: str) -> list[Any]:
        return list(self._library.parse(text, parsing_timeout=None))


class ReasoningGym(Builtin):
    """1 if the verifier of the task's family gives 1 for the answer, else 0.

    Less than 1 counts as 0, because verifiers give some wrong answers a small score, such as 0.05 for "0" in a sum.

    Args:
        pattern: regular expression; the first group of its last match in the last turn is the answer, without
            white space around it. If nothing matches, or with null, the whole turn is.
        partial: give the verifier's score unchanged.
        seconds: processor time for one answer; an answer that takes longer to verify is wrong.

    Raises:
        ValueError: by `score`, if the row is not from reasoning-gym.
    """

    in_pool = True

    def __init__(self, pattern: str | None = ELEMENT, partial: bool = False, seconds: float = 5.0) -> None:
        _check_seconds(seconds)
        self._pattern = compiled(pattern, re.DOTALL, "the answer") if pattern is not None else None
        installed_families()
        self._partial, self._seconds = partial, seconds

    def score(self, outcome: Outcome) -> float:
        family, entry = outcome.row.get("family"), outcome.row.get("entry")
        if not isinstance(family, str) or not isinstance(entry, str):
            raise ValueError(
                "the data row has no `family` and `entry`, which rows of `data.train: reasoning_gym:FAMILY` have"
            )
        value = cpu_limit(self._seconds, lambda: score_answer(family, self.answer(outcome), json.loads(entry))) or 0.0
        return value if self._partial else float(value >= 1)

    def answer(self, outcome: Outcome) -> str:
        matches = list(self._pattern.finditer(outcome.text)) if self._pattern is not None else []
        return ((matches[-1][1] if matches else outcome.text) or "").strip()
