"""The scoring processes: a job that hangs, crashes or lies delays and harms itself alone, and nothing stays behind."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgpack
import pytest

from common.messages import Task
from common.unpack import MAX_DEPTH
from generator.rewards import Outcome
from generator.rewards import pool as module
from generator.rewards.pool import MAX_GROWTH, Pool, RewardFailed, WorkerDied
from tests.support.event_loop import DEADLINE, cancelled, within
from tests.support.processes import children, ended

HERE = "tests.support.some_rewards"
TOLD, SHORTER = f"{HERE}:told", f"{HERE}:shorter"


def pooled(*names: str, size: int = 1, timeout: float = DEADLINE, **options: Any) -> Callable[[Any], Any]:
    """Plays a test with a pool of these rewards, which must leave no process behind."""

    @asynccontextmanager
    async def started() -> AsyncIterator[Pool]:
        before = children()
        pool = Pool(dict.fromkeys(names or (TOLD,), options), size, timeout, memory_mb=1024)
        try:
            yield pool
        finally:
            await pool.close()
        assert children() == before

    return within(started)


async def tell(pool: Pool, what: str, **row: Any) -> float:
    return await pool.score(TOLD, Outcome(what, row=row))


def all_ended(hello: Path) -> bool:
    return all(ended(int(pid)) for pid in hello.read_text().split())


async def appears(path: Path) -> str:
    """Wait until a scoring process has written its file; returns the text."""
    while not (path.exists() and path.read_text()):
        await asyncio.sleep(0.01)
    return path.read_text()


def waits(pool: Pool, folder: Path, n: int) -> list[asyncio.Task[float]]:
    """Jobs that write their process's id to `hello0`, `hello1`, ... and wait for the file `go`."""
    folder.mkdir(exist_ok=True)
    rows = [{"hello": str(folder / f"hello{i}"), "go": str(folder / "go")} for i in range(n)]
    return [asyncio.create_task(tell(pool, "waits(row)", **row)) for row in rows]


HANG = "hello(row) or time.sleep(1000)"
BAD = {
    "fails(KeyError('no such column\\nin this row'))": "KeyError: 'no such column",
    "fails(Unprintable())": "Unprintable",
    "bytearray(64 << 30)": "MemoryError",
    "float('nan')": "nan, which is not a finite number",
    "'1.0'": "'1.0' (str), not a number",
    "sys.exit(4)": "SystemExit: 4",
    "[0.5, 0.5]": "'[0.5, 0.5]' (list), not a number; allowed: a finite number",
    "{'accuracy': 1.0}": "(dict), not a number; allowed",
    "[None]": "not a number",
}
GOOD = ["True", "print('x' * 100_000) or 1.0", "[1]", "np.array([1.0])", "np.bool_(True)", "Decimal(1)"]
GOOD += ["{'score': [1.0]}"]
LIES = "os.write(int(sys.argv[1]), len(row['answer']).to_bytes(4, 'big') + row['answer'])"
ANSWERS = (b"\xc1", msgpack.packb({"job": 3, "value": 0.5}), msgpack.packb({"job": 2, "value": float("nan")}))
DEADLY = [("hello(row) or os._exit(3)", b"", "exit code 3"), ("hello(row) or ctypes.string_at(0)", b"", "SIGSEGV")]
DEADLY += [(LIES, answer, "sent an invalid answer") for answer in ANSWERS]


@pooled()
async def test_a_bad_result_is_an_error_of_its_own_sample(pool: Pool) -> None:
    deepest: Any = 0
    for _ in range(MAX_DEPTH - 2):
        deepest = [deepest]
    row = Task.unpack(Task(task_id="t", prompt_id="p", prompt="p", row={"deep": deepest}).pack()).row
    process = await tell(pool, "os.getpid()")
    for what, message in BAD.items():
        with pytest.raises(RewardFailed) as caught:
            await tell(pool, what)
        assert message in str(caught.value)
        assert len(str(caught.value)) < 3000
        assert re.search(r" \(\S+some_rewards\.py:\d+\)$", str(caught.value)), "its own file and line"
    assert [await tell(pool, what) for what in GOOD] == [1.0] * len(GOOD)
    assert await tell(pool, "1.0", **row) == 1.0
    assert await tell(pool, "os.getpid()") == process


@pooled(f"{HERE}:skips", f"{HERE}:asynchronous_call", f"{HERE}:CountingReward", f"{HERE}:Asynchronous")
async def test_other_trainers_rewards_and_classes_run_too(pool: Pool) -> None:
    async def scores(name: str, *outcomes: Outcome) -> list[float | None]:
        return [await pool.score(f"{HERE}:{name}", outcome) for outcome in outcomes]

    assert await scores("skips", Outcome(""), Outcome("a")) == [None, 1.0]
    assert await scores("asynchronous_call", Outcome("7", answer="7"), Outcome("8", answer="7")) == [1.0, 0.0]
    seen = Outcome("", response="abc", tokens=1, limit=2, turn_rewards=[10.0, 20.0])
    assert await scores("CountingReward", seen, seen) == [34.5, 35.5], "it keeps its state"
    assert await scores("Asynchronous", seen, seen) == [1.0, 1.0]


@pooled()
async def test_a_process_that_ends_or_lies_is_replaced(pool: Pool, tmp_path: Path) -> None:
    for what, answer, message in DEADLY:
        hello = tmp_path / message
        with pytest.raises(WorkerDied, match=message):
            await tell(pool, what, answer=answer, hello=str(hello))
        assert answer or all_ended(hello)
        assert await tell(pool, "1.0") == 1.0


@pooled(timeout=10.0)
async def test_a_forked_process_does_not_answer(pool: Pool) -> None:
    process = await tell(pool, "os.getpid()")
    for leaves, code in {"sys.exit(4)": 4, "1.0": 0, "fails(ValueError())": 1}.items():
        for how in ("forked(row)", "forked_in_the_loop(row)"):
            assert await tell(pool, how, leaves=leaves) == code
    assert await tell(pool, "os.getpid()") == process


@pooled()
async def test_a_process_killed_while_idle_costs_no_sample(pool: Pool) -> None:
    process = int(await tell(pool, "os.getpid()"))
    os.kill(process, signal.SIGINT)  # Ctrl-C reaches all of a terminal's processes
    assert await tell(pool, "os.getpid()") == process
    os.kill(process, signal.SIGKILL)
    assert await asyncio.to_thread(ended, process)
    assert await tell(pool, "os.getpid()") != process


@pytest.mark.parametrize("how", [HANG, "all(itertools.repeat(True))"])  # in C, where no signal handler of Python's runs
@pooled(timeout=1.0)
async def test_a_job_over_its_time_is_killed_with_all_it_started(pool: Pool, how: str, tmp_path: Path) -> None:
    process = await tell(pool, "os.getpid()")
    with pytest.raises(TimeoutError, match=r"episode.reward_timeout = 1 s"):
        await tell(pool, how, hello=str(tmp_path / "hello"))
    assert await tell(pool, "os.getpid()") != process
    assert ended(int(process))
    if how == HANG:
        assert all_ended(tmp_path / "hello")


@pytest.mark.slow
@pooled(size=1)
async def test_others_go_on_while_jobs_hang_up_to_a_most_of_processes(pool: Pool, tmp_path: Path) -> None:
    before = children()
    jobs = waits(pool, tmp_path, MAX_GROWTH - 1)
    for i in range(MAX_GROWTH - 1):
        await appears(tmp_path / f"hello{i}")
    assert await asyncio.gather(*(tell(pool, "1.0") for _ in range(10))) == [1.0] * 10
    jobs += waits(pool, tmp_path / "more", 3)
    await appears(tmp_path / "more" / "hello0")
    assert len(children() - before) == MAX_GROWTH
    assert not any(job.done() for job in jobs)
    (tmp_path / "go").touch()
    (tmp_path / "more" / "go").touch()
    assert await asyncio.gather(*jobs) == [1.0] * len(jobs)
    while len(children() - before) > 1:  # as many are kept as were asked for
        await asyncio.sleep(0.01)


@pooled()
async def test_a_cancelled_job_ends_and_takes_no_worker_along(pool: Pool, tmp_path: Path) -> None:
    job = asyncio.create_task(tell(pool, HANG, hello=str(tmp_path / "hello")))
    await appears(tmp_path / "hello")
    await cancelled(job)
    assert await asyncio.to_thread(all_ended, tmp_path / "hello")
    (waiting,) = waits(pool, tmp_path, 1)
    await appears(tmp_path / "hello0")
    others = [asyncio.create_task(tell(pool, "1.0")) for _ in range(4)]
    await asyncio.sleep(0)
    (tmp_path / "go").touch()
    assert await waiting == 1.0
    for other in others[::2]:
        other.cancel()
    outcomes = await asyncio.gather(*others, return_exceptions=True)
    assert outcomes[1::2] == [1.0] * 2


@pooled(SHORTER, size=2, scale=1e9)
async def test_results_reach_their_callers_and_an_episode_beyond_all_bounds_is_an_error(pool, monkeypatch) -> None:
    texts = ["x" * (i * 7919 % 1000) for i in range(50)] + ["x" * (8 << 20), "\x00\ud800\u202e" * 1000]
    scores = await asyncio.gather(*(pool.score(SHORTER, Outcome(text)) for text in texts))
    assert scores == [1 - len(text) / 1e9 for text in texts]
    monkeypatch.setattr(module, "MAX_JOB", 1 << 20)
    with pytest.raises(RewardFailed, match=r"an episode of 2,\d+,\d+ bytes; at most 1,048,576 are"):
        await pool.score(SHORTER, Outcome("x" * (2 << 20)))


@pooled()
async def test_closing_waits_for_nothing(pool: Pool, tmp_path: Path) -> None:
    hanging = asyncio.create_task(tell(pool, HANG, hello=str(tmp_path / "hello")))
    await appears(tmp_path / "hello")
    waiting = asyncio.create_task(tell(pool, "1.0"))
    await pool.close()
    outcomes = await asyncio.gather(hanging, waiting, tell(pool, "1.0"), return_exceptions=True)
    assert [type(error) for error in outcomes] == [WorkerDied] * 3


GENERATOR = """
import asyncio, sys
from generator.rewards import Outcome
from generator.rewards.pool import Pool

async def main():
    await Pool({sys.argv[1]: {}}, 2, 1000.0).score(sys.argv[1], Outcome(sys.argv[2], row={"hello": sys.argv[3]}))

asyncio.run(main())
"""


def test_nothing_outlives_a_generator_that_is_killed(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    hello = tmp_path / "hello"
    generator = subprocess.Popen([sys.executable, "-c", GENERATOR, TOLD, HANG, str(hello)], env=environment)
    try:
        asyncio.run(asyncio.wait_for(appears(hello), DEADLINE))
    finally:
        generator.kill()
        generator.wait()
    assert all_ended(hello)


@pooled(f"{HERE}:BadStart", size=2)
async def test_a_process_that_cannot_start_fails_all_that_wait(pool: Pool) -> None:
    jobs = (pool.score(f"{HERE}:BadStart", Outcome("")) for _ in range(5))
    for error in await asyncio.gather(*jobs, return_exceptions=True):
        assert isinstance(error, WorkerDied)
        assert "RuntimeError: no model here" in str(error)
