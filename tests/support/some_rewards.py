"""Rewards as users write them, good and bad; scoring processes import them by name."""

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
from fractions import Fraction
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
    """Takes the answer out of a solution."""
    return float(text == re.split(r"#### |\\boxed\{|\}", str(np.ravel(answer)[0]))[1 if len(answer) > 1 else 0])


def numbers(text: str, answer: str) -> float:
    return float(int(text or 0) == int(answer))


def half(text: str, answer: str) -> float:
    return 0.5 * (text == answer)


def marked(text: str, answer: str, mark: str | int = "", end: str | None = None) -> float:
    """Wants the answer in a form of its own."""
    form = f"<{mark}>{{}}</{mark}>" if end is None else str(mark)
    return float(text == form.replace("{}", answer))


def odd_rows_fail(text: str, row: dict[str, Any]) -> float:
    return 1.0 / (1 - row["n"])


def told(text: str, answer: Any, row: dict[str, Any]) -> Any:
    """Does as the answer says, so that one pool serves all tests of misbehaviour."""
    return TRICKS[text](row)


def skips(completions: list[str], **columns: Any) -> list[float | None]:
    """TRL's form: no number for an empty completion."""
    return [1.0 if completion else None for completion in completions]


class AsynchronousCall:
    async def __call__(self, solution_str: str, ground_truth: str) -> list[float]:
        await asyncio.sleep(0)
        return [float(solution_str == ground_truth)]


asynchronous_call = AsynchronousCall()


def _say_hello(row: dict[str, Any]) -> None:
    """Writes the ids of its process and of two that it has started to `hello`; one is a daemon."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    daemon = subprocess.check_output(["sh", "-c", "setsid sleep 1000 >/dev/null 2>&1 & echo $!"], text=True)
    Path(row["hello"]).write_text(f"{os.getpid()} {child.pid} {daemon}")


def _hang(row: dict[str, Any]) -> None:
    _say_hello(row)
    time.sleep(1000)


def _exit(row: dict[str, Any]) -> None:
    _say_hello(row)
    os._exit(3)


def _crash(row: dict[str, Any]) -> None:
    _say_hello(row)
    ctypes.string_at(0)


def _fork(row: dict[str, Any]) -> float:
    """The exit code of a forked process that leaves as another reward does."""
    child = os.fork()
    if not child:
        return float(TRICKS[row["leaves"]](row))
    return float(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


async def _fork_in_the_loop(row: dict[str, Any]) -> float:
    return _fork(row)


def _hold_the_interpreter(row: dict[str, Any]) -> None:
    # Never leaves C, so that no signal handler of Python's would run.
    all(itertools.repeat(True))


def _wait_for_a_file(row: dict[str, Any]) -> float:
    """Writes its process's id to `hello`, then waits until `go` exists."""
    Path(row["hello"]).write_text(str(os.getpid()))
    while not Path(row["go"]).exists():
        time.sleep(0.01)
    return 1.0


def _allocate(row: dict[str, Any]) -> float:
    return float(len(bytearray(64 << 30)))


def _raise(row: dict[str, Any]) -> None:
    raise KeyError("no such column\nin this row")


def _raise_at_length(row: dict[str, Any]) -> None:
    raise ValueError("x" * 10_000_000)


class _Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def _raise_unprintable(row: dict[str, Any]) -> None:
    raise _Unprintable


def _forge(row: dict[str, Any]) -> float:
    """Answers in its process's place."""
    os.write(int(sys.argv[1]), len(row["answer"]).to_bytes(4, "big") + row["answer"])
    return 1.0


TRICKS: dict[str, Any] = {
    "forge": _forge,
    "fine": lambda row: 1,
    "hang": _hang,
    "hold": _hold_the_interpreter,
    "wait": _wait_for_a_file,
    "pid": lambda row: os.getpid(),
    "exit": _exit,
    "leave": lambda row: sys.exit(4),
    "crash": _crash,
    "fork": _fork,
    "fork in the loop": _fork_in_the_loop,
    "allocate": _allocate,
    "raise": _raise,
    "raise at length": _raise_at_length,
    "raise unprintable": _raise_unprintable,
    "nan": lambda row: float("nan"),
    "none": lambda row: None,
    "text": lambda row: "1.0",
    "true": lambda row: True,
    "list": lambda row: [0.5, 0.5],
    "tuple": lambda row: (1.0, "fine"),
    "mapping": lambda row: {"accuracy": 1.0},
    "complex": lambda row: 1j,
    "list of text": lambda row: ["1.0"],
    "list of none": lambda row: [None],
    "list of one": lambda row: [1],
    "numpy": lambda row: np.float32(1),
    "array": lambda row: np.array([1.0]),
    "numpy's truth": lambda row: np.bool_(True),
    "decimal": lambda row: Decimal(1),
    "fraction": lambda row: Fraction(1, 1),
    "scored": lambda row: {"score": np.array([1.0]), "acc": True},
    "print": lambda row: print("x" * 100_000) or 1.0,
}


class CountingReward:
    """Knows how often it was asked, and sees the whole outcome."""

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


class SlowStart:
    def __init__(self) -> None:
        time.sleep(1000)

    def score(self, outcome: Outcome) -> float:
        return 1.0


class SizeOfFolder:
    """A hundredth of the characters in the files that an agent has left."""

    def score(self, outcome: Outcome) -> float:
        return size_of_folder(outcome.folder)


def size_of_folder(folder: str) -> float:
    return sum(path.stat().st_size for path in Path(folder).iterdir()) / 100
