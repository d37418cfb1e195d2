"""Compares what a program prints with what it should print."""

from __future__ import annotations

import math

SLACK = 64 << 10  # characters of output beyond twice the expected ones that are still looked at


def same_output(output: str, expected: str, tolerance: float | None = None) -> bool:
    """Whether two outputs agree, trailing white space of lines and empty lines at the end aside."""
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
    # Integers are exact: tolerance is for what rounding may do.
    if not (math.isfinite(x) and math.isfinite(y)) or (_is_integer(a) and _is_integer(b)):
        return False
    return math.isclose(x, y, rel_tol=tolerance, abs_tol=tolerance)


def _is_integer(text: str) -> bool:
    return text.lstrip("+-").isdigit()
