"""Reward processes: each runs one job at a time, and is killed with all it has started when the job takes too long.

pebble is not used: its pool kills its own process but not the processes that this one has started, and it breaks as a
whole if an idle process is killed from outside, for example by the OOM killer.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Coroutine, Mapping
from dataclasses import fields
from typing import Any, Self

from common.messages import Failure
from common.process import ending, in_thread
from common.unpack import Unreadable
from generator.rewards.outcome import Outcome
from generator.rewards.scoring_process import HEAD, MAX_JOB, MAX_RESULT, pack, unpack_result

START_SECONDS = 120.0  # a process imports what the user's rewards need
SLOW_SECONDS = 1.0  # a job that takes longer no longer counts towards `size`
MAX_GROWTH = 4  # times `size`: maximum number of processes, if all jobs are slow

_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[3])
from signal import SIGUSR1
from common.keeper import keep
keep(int(sys.argv[2]), (int(sys.argv[1]),), SIGUSR1)
from generator.rewards.scoring_process import main
main(int(sys.argv[1]))
"""
_FIELDS = tuple(field.name for field in fields(Outcome))


class RewardFailed(Exception):
    """A reward raised an exception, or did not return a number."""

    failure = Failure.REWARD_FAILED


class WorkerDied(Exception):
    """The process ended in the middle of a job, or cannot start."""

    failure = Failure.WORKER_DIED


class ScoringProcess:
    """One process of `generator.rewards.scoring_process` with its keeper, and the socket to it."""

    def __init__(self, keeper: subprocess.Popen[bytes], connection: socket.socket) -> None:
        self._keeper, self._socket = keeper, connection
        self._jobs = itertools.count()
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._killed = False

    @classmethod
    async def start(cls, settings: Mapping[str, Any]) -> Self:
        """Start a process that has loaded its rewards; raises `WorkerDied` if it cannot."""
        own_end, other_end = socket.socketpair()
        with other_end:
            path = json.dumps([os.path.abspath(place) for place in sys.path])
            keeper = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM, str(other_end.fileno()), str(os.getpid()), path],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a reward prints goes to stderr
                pass_fds=[other_end.fileno()],
                start_new_session=True,
            )
        process = cls(keeper, own_end)
        try:
            process._reader, process._writer = await asyncio.open_connection(sock=own_end)
            async with asyncio.timeout(START_SECONDS):
                reply = await process._ask([settings])
        except TimeoutError:
            await process.kill()
            raise WorkerDied(f"a scoring process did not start within {START_SECONDS:g} s") from None
        except BaseException:
            await process.kill()
            raise
        if "error" in reply:
            await process.kill()
            raise WorkerDied(f"a scoring process cannot start: {reply['error']}")
        return process

    def alive(self) -> bool:
        assert self._reader is not None
        return self._keeper.poll() is None and not self._reader.at_eof()

    async def call(self, method: str, name: str, outcome: Outcome) -> float | str | None:
        """Return the result of a reward's method, `score` or `answer`.

        Raises `RewardFailed` or `WorkerDied`; after the latter, or a cancellation, the process must be killed.
        """
        # A flat list: the nesting depth is limited, and the row must not be nested deeper here than in its task.
        reply = await self._ask([method, name, *(getattr(outcome, field) for field in _FIELDS)])
        if "error" in reply:
            raise RewardFailed(f"reward {name!r}: {reply['error']}")
        return reply["value"]

    async def kill(self) -> None:
        """End the process and all it has started, whatever it is doing."""
        if not self._killed:
            self._killed = True
            self._keeper.send_signal(signal.SIGUSR1)
            if self._writer is not None:
                self._writer.transport.abort()
            else:
                self._socket.close()
        await in_thread(self._keeper.wait)

    async def _ask(self, message: list[Any]) -> dict[str, Any]:
        assert self._reader is not None
        assert self._writer is not None
        number = next(self._jobs)
        job = pack([number, *message])
        if len(job) > MAX_JOB:
            raise RewardFailed(f"an episode of {len(job):,} bytes; at most {MAX_JOB:,} are allowed")
        try:
            self._writer.write(job)
            await self._writer.drain()
            (size,) = HEAD.unpack(await self._reader.readexactly(HEAD.size))
            if size > MAX_RESULT:
                raise WorkerDied(f"a scoring process answered with {size} bytes")
            return unpack_result(await self._reader.readexactly(size), number)
        except (asyncio.IncompleteReadError, ConnectionError):
            raise WorkerDied(f"a scoring process ended by itself ({await self._ending()})") from None
        except Unreadable as error:
            raise WorkerDied(f"a scoring process sent an invalid answer ({error})") from None

    async def _ending(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            await in_thread(self._keeper.wait, 5)
        code = self._keeper.returncode
        return "it closed its connection" if code is None else ending(code)


class Pool:
    """Processes, started when they are needed and replaced when they are lost; for one event loop.

    `size` jobs run at once. A job that takes longer than `SLOW_SECONDS` keeps running but no longer counts, and another
    process is started if a job waits for one. So hanging jobs delay no others, until there are `MAX_GROWTH` times
    `size` processes.

    Args:
        rewards: {name: options} of what the processes can score.
        timeout: seconds until a job is killed, counted from when a process gets it.
        memory_mb: limit of each process, in MiB.
    """

    def __init__(
        self, rewards: Mapping[str, Mapping[str, Any]], size: int, timeout: float, memory_mb: int = 4096
    ) -> None:
        self._settings = {"rewards": {name: dict(options) for name, options in rewards.items()}, "memory_mb": memory_mb}
        self._size, self._timeout = size, timeout
        self._waiting: deque[asyncio.Future[ScoringProcess]] = deque()
        self._idle: list[ScoringProcess] = []
        self._working: set[ScoringProcess] = set()
        self._slow: set[ScoringProcess] = set()  # a subset of `_working`
        self._starts: set[asyncio.Task[None]] = set()
        self._ends: set[asyncio.Task[None]] = set()
        self._closed = False

    async def score(self, name: str, outcome: Outcome) -> float | None:
        """Return one reward of an outcome; None if a reward of TRL's form leaves the outcome out.

        Raises:
            TimeoutError: it took too long, and was killed.
            RewardFailed: it raised, or returned no finite number.
            WorkerDied: it ended its process, or no process can be started.
        """
        value = await self._call("score", name, outcome)
        if isinstance(value, str):
            raise RewardFailed(f"reward {name!r}: returned a text, not a number")
        return value

    async def answer(self, name: str, outcome: Outcome) -> str:
        """Return the answer that a reward compares; raises like `score`."""
        return str(await self._call("answer", name, outcome))

    async def close(self) -> None:
        """End all processes; running jobs fail."""
        self._closed = True
        self._fail_waiting(WorkerDied("the scoring processes are closed"))
        for start in self._starts:
            start.cancel()
        for process in [*self._idle, *self._working]:
            self._discard(process)
        await asyncio.gather(*self._starts, *self._ends, return_exceptions=True)

    async def _call(self, method: str, name: str, outcome: Outcome) -> float | str | None:
        process = await self._acquire()
        slow = asyncio.get_running_loop().call_later(SLOW_SECONDS, self._mark_slow, process)
        put_away = self._discard  # unless it answers, it died, hangs, or is busy with a job that was cancelled
        try:
            async with asyncio.timeout(self._timeout):
                value = await process.call(method, name, outcome)
            put_away = self._release
            return value
        except RewardFailed:
            put_away = self._release
            raise
        except TimeoutError:
            limit = f"episode.reward_timeout = {self._timeout:g} s"
            raise TimeoutError(f"reward {name!r} took longer than {limit}") from None
        finally:
            slow.cancel()
            put_away(process)

    async def _acquire(self) -> ScoringProcess:
        """Return a live process, counted as working from now on."""
        while self._idle:
            process = self._idle.pop()
            if process.alive():
                self._working.add(process)
                return process
            self._discard(process)
        if self._closed:
            raise WorkerDied("the scoring processes are closed")
        future: asyncio.Future[ScoringProcess] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        self._start_missing()
        try:
            return await future
        except asyncio.CancelledError:
            if future in self._waiting:
                self._waiting.remove(future)
            elif not future.cancelled() and future.exception() is None:
                self._release(future.result())
            raise

    def _release(self, process: ScoringProcess) -> None:
        """Give a free process to the next job that waits; if none does, keep it, or end it if there are enough."""
        self._working.discard(process)
        self._slow.discard(process)
        future = self._next_waiting()
        if future is not None:
            self._working.add(process)
            future.set_result(process)
        elif self._closed or len(self._idle) + len(self._working) - len(self._slow) >= self._size:
            self._discard(process)
        else:
            self._idle.append(process)

    def _discard(self, process: ScoringProcess) -> None:
        self._working.discard(process)
        self._slow.discard(process)
        _run_in_background(self._ends, process.kill())
        self._start_missing()

    def _mark_slow(self, process: ScoringProcess) -> None:
        self._slow.add(process)
        self._start_missing()

    def _start_missing(self) -> None:
        """Start processes for jobs that wait, within the limits."""
        while (
            not self._closed
            and len(self._starts) < len(self._waiting)
            and len(self._starts) + len(self._working) - len(self._slow) < self._size
            and len(self._starts) + len(self._working) < MAX_GROWTH * self._size
        ):
            _run_in_background(self._starts, self._start())

    async def _start(self) -> None:
        try:
            process = await ScoringProcess.start(self._settings)
        except Exception as error:
            # Waiting jobs fail only if no other process is left to run them. Starts that fail in the same round of the
            # event loop must not count each other, so this one is removed here, before its callback does so.
            self._starts.discard(asyncio.current_task())
            if not self._starts and not self._working:
                self._fail_waiting(WorkerDied(str(error)))
        else:
            self._release(process)

    def _fail_waiting(self, error: Exception) -> None:
        while (future := self._next_waiting()) is not None:
            future.set_exception(error)

    def _next_waiting(self) -> asyncio.Future[ScoringProcess] | None:
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                return future
        return None


def _run_in_background(tasks: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> None:
    """Start a background task and keep a reference: without one it may be garbage-collected."""
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
