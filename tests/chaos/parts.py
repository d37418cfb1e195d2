"""The tool and the reward of a chaotic run: they fail while a file says so, and are the quickstart's otherwise."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

from generator.rewards.outcome import Outcome
from generator.rewards.rules import Exact
from generator.tools.calculator import Calculator

SHARE = 0.3  # of the calls that fail


class Panic(BaseException):
    """Raised by a tool, as the panic of an extension written in Rust is: it is no `Exception`."""


class PanickingCalculator(Calculator):
    """Panics in some calls.

    Args:
        while_there: the file.
    """

    def __init__(self, while_there: str) -> None:
        self._flag = Path(while_there)

    async def call(self, expression: str) -> str:
        if self._flag.exists() and random.random() < SHARE:
            raise Panic("a tool panicked")
        return await super().call(expression)


class ForkingExact(Exact):
    """Forks in some calls; the child, which has all that its parent had open, leaves by `sys.exit`.

    Args:
        while_there: the file.
    """

    def __init__(self, while_there: str) -> None:
        self._flag = Path(while_there)

    def score(self, outcome: Outcome) -> float:
        if self._flag.exists() and random.random() < SHARE and os.fork() == 0:
            sys.exit()
        return super().score(outcome)
