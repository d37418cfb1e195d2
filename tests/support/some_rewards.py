"""Rewards as users write them, good and bad; scoring processes import them by name."""

# ruff: noqa: F401 (what texts evaluate)

from __future__ import annotations

import asyncio
import ctypes
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from generator.rewards import Outcome

NOT_CALLABLE = 1.0


def shorter(text: str, answer: Any, row: dict[str, Any], scale: float = 100.0) -> float:
    return max(0.0, 1.0 - len(text) / scale)


def three(text: str, answer: Any, row: dict[str, Any]) -> float:
    return 3.0


def broken(text: str, answer: Any, row: dict[str, Any]) -> float:
    raise KeyError("no such column")


def never(text: str, answer: Any) -> float:
    """Compares texts with a number, as if the data had numbers."""
    return float(text == 4)


def boxes(text: str, answer: str) -> float:
    return float("boxed" in text)


def solved(text: str, answer: str | list[str]) -> float:
    return float(text == re.split(r"#### |\\boxed\{|\}", str(np.ravel(answer)[0]))[1 if len(answer) > 1 else 0])


def numbers(text: str, answer: str) -> float:
    return float(int(text or 0) == int(answer))


def half(text: str, answer: str) -> float:
    return 0.5 * (text == answer)


def marked(text: str, answer: str, mark: str | int = "", end: str | None = None) -> float:
    form = f"<{mark}>{{}}</{mark}>" if end is None else str(mark)
    return float(text == form.replace("{}", answer))


def odd_rows_fail(text: str, row: dict[str, Any]) -> float:
    return 1.0 / (1 - row["n"])


def told(text: str, answer: Any, row: dict[str, Any]) -> Any:
    """What the text says in Python, so that one pool serves all tests of misbehaviour."""
    return eval(text, globals(), {"row": row})


def fails(error: Exception) -> None:
    raise error


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def hello(row: dict[str, Any]) -> None:
    """Writes the ids of its process and of two that it has started to `hello`; one is a daemon."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    daemon = subprocess.check_output(["sh", "-c", "setsid sleep 1000 >/dev/null 2>&1 & echo $!"], text=True)
    Path(row["hello"]).write_text(f"{os.getpid()} {child.pid} {daemon}")


def forked(row: dict[str, Any]) -> float:
    """The exit code of a forked process that leaves as another reward does."""
    child = os.fork()
    if not child:
        return float(told(row["leaves"], None, row))
    return float(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


async def forked_in_the_loop(row: dict[str, Any]) -> float:
    return forked(row)


def waits(row: dict[str, Any]) -> float:
    """Writes its process's id to `hello`, then waits until `go` exists."""
    Path(row["hello"]).write_text(str(os.getpid()))
    while not Path(row["go"]).exists():
        time.sleep(0.01)
    return 1.0


def skips(completions: list[str], **columns: Any) -> list[float | None]:
    """TRL's form: no number for an empty completion."""
    return [1.0 if completion else None for completion in completions]


class AsynchronousCall:
    async def __call__(self, solution_str: str, ground_truth: str) -> list[float]:
        await asyncio.sleep(0)
        return [float(solution_str == ground_truth)]


asynchronous_call = AsynchronousCall()


class CountingReward:
    def __init__(self, start: int = 0) -> None:
        self.calls = start

    def score(self, outcome: Outcome) -> float:
        self.calls += 1
        return self.calls + len(outcome.response) + sum(outcome.turn_rewards) + outcome.tokens / outcome.limit


class Asynchronous:
    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None

    async def score(self, outcome: Outcome) -> float:
        await asyncio.sleep(0)
        # A connection made in one call must be of use in the next.
        same = self.loop in (None, asyncio.get_running_loop())
        self.loop = asyncio.get_running_loop()
        return float(same)


class NoScore:
    pass


class BadStart:
    def __init__(self) -> None:
        raise RuntimeError("no model here")

    def score(self, outcome: Outcome) -> float:
        return 1.0


class SizeOfFolder:
    def score(self, outcome: Outcome) -> float:
        return size_of_folder(outcome.folder)


def size_of_folder(folder: str) -> float:
    return sum(path.stat().st_size for path in Path(folder).iterdir()) / 100
