"""Tool, agent and reward of a chaotic run: those of the quickstart, which fail while a certain file exists."""

from __future__ import annotations

import asyncio
import os
import random
import sys
from pathlib import Path
from typing import Any

from generator.rewards.outcome import Outcome
from generator.rewards.rules import Exact
from generator.tools.calculator import Calculator

SHARE = 0.3  # of the calls that fail
AGENTS_FAIL = "CHAOS_AGENTS_FAIL"  # the variable that names the agents' file


class Panic(BaseException):
    """Raised by a tool, like the panic of an extension written in Rust: it is not an `Exception`."""


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


async def solve(task: Any) -> str:
    """The quickstart's agent, which in some tasks breaks off a request and sends it again, and panics in some."""
    # Only generators need it, and it makes a client of the `openai` package.
    from launcher.tasks.calculator_agent import solve as calculate

    fails = Path(os.environ[AGENTS_FAIL]).exists()
    if fails and random.random() < SHARE:
        broken_off = asyncio.ensure_future(calculate(task))
        await asyncio.wait({broken_off}, timeout=random.uniform(0, 0.1))
        broken_off.cancel()
    answer = await calculate(task)
    if fails and random.random() < SHARE:
        raise Panic("an agent panicked")
    return answer


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
