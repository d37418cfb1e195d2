"""The scoring processes: a job that hangs, crashes or lies delays and harms itself alone, and nothing stays behind."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgpack
import pytest

from common.messages import Task
from common.unpack import MAX_DEPTH
from generator.rewards import Outcome, pool
from generator.rewards.pool import MAX_GROWTH, Pool, RewardFailed, WorkerDied
from tests.support.processes import children, ended, loop_lag

HERE = "tests.support.some_rewards"
TOLD, SHORTER = f"{HERE}:told", f"{HERE}:shorter"
DEADLINE = 120.0


@asynccontextmanager
async def pool_of(*names: str, size: int = 1, timeout: float = DEADLINE, **options: Any) -> AsyncIterator[Pool]:
    made = Pool(dict.fromkeys(names or (TOLD,), options), size, timeout, memory_mb=1024)
    try:
        async with asyncio.timeout(DEADLINE):
            yield made
    finally:
        await made.close()


def play(scene: Callable[[], Awaitable[None]]) -> None:
    """Run a scene, which must leave neither processes behind nor errors that nobody sees."""
    before = children()
    unseen: list[dict[str, Any]] = []

    async def watched() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: unseen.append(context))
        await scene()
        gc.collect()

    asyncio.run(watched())
    assert unseen == []
    assert children() == before


async def tell(pool: Pool, what: str, **row: Any) -> float:
    return await pool.score(TOLD, Outcome(what, row=row))


async def appears(path: Path) -> str:
    """What a scoring process wrote about itself, once it has."""
    while not (path.exists() and path.read_text()):
        await asyncio.sleep(0.01)
    return path.read_text()


def waits(pool: Pool, folder: Path, n: int) -> list[asyncio.Task[float]]:
    """Jobs that write their process's id to `hello0`, `hello1`, ... and wait for the file `go`."""
    rows = [{"hello": str(folder / f"hello{i}"), "go": str(folder / "go")} for i in range(n)]
    return [asyncio.create_task(tell(pool, "wait", **row)) for row in rows]


BAD = {
    "raise": "KeyError: 'no such column",
    "raise at length": "ValueError: xxx",
    "raise unprintable": "_Unprintable",
    "allocate": "MemoryError",
    "nan": "nan, which is no finite number",
    "infinity": "inf, which is no finite number",
    "none": "NoneType",
    "text": "'1.0' (str), not a number",
    "list": "TypeError",
    "leave": "SystemExit: 4",
    "interrupt": "KeyboardInterrupt",
}
DEADLY: list[tuple[str, dict[str, Any], str]] = [
    ("exit", {}, "exit code 3"),
    ("crash", {}, "SIGSEGV"),
    ("abort", {}, "SIGABRT"),
]
FORGED = [
    b"", b"\xc1", b"\x91" * 60_000, b"\xdd\xff\xff\xff\xff", msgpack.packb([1.0]), msgpack.packb({"ready": True}),
    msgpack.packb({"value": float("nan")}), msgpack.packb({"value": None}), msgpack.packb({"error": 7}),
]  # fmt: skip
DEADLY += [("forge", {"answer": answer}, "answered with something else") for answer in FORGED]


def test_a_bad_result_is_an_error_of_its_own_sample() -> None:
    deepest: Any = 0
    for _ in range(MAX_DEPTH - 2):
        deepest = [deepest]
    row = Task.unpack(Task(task_id="t", prompt_id="p", prompt="p", row={"deep": deepest}).pack()).row

    async def scene() -> None:
        async with pool_of() as pool:
            process = await tell(pool, "pid")
            for what, message in BAD.items():
                with pytest.raises(RewardFailed) as caught:
                    await tell(pool, what)
                assert message in str(caught.value)
                assert len(str(caught.value)) < 3000
            assert await tell(pool, "true") == await tell(pool, "print") == await tell(pool, "fine", **row) == 1.0
            assert await tell(pool, "pid") == process

    play(scene)


def test_a_process_that_ends_or_lies_is_replaced() -> None:
    async def scene() -> None:
        async with pool_of() as pool:
            for what, row, message in DEADLY:
                with pytest.raises(WorkerDied) as caught:
                    await tell(pool, what, **row)
                assert message in str(caught.value)
                assert await tell(pool, "fine") == 1.0

    play(scene)


def test_an_episode_beyond_all_bounds_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "MAX_JOB", 1 << 20)

    async def scene() -> None:
        async with pool_of(SHORTER) as made:
            with pytest.raises(RewardFailed, match=r"an episode of 2,\d+,\d+ bytes, where at most 1,048,576 are"):
                await made.score(SHORTER, Outcome("x" * (2 << 20)))
            assert await made.score(SHORTER, Outcome("")) == 1.0

    play(scene)


def test_a_process_killed_while_idle_costs_no_sample() -> None:
    async def scene() -> None:
        async with pool_of() as pool:
            process = int(await tell(pool, "pid"))
            os.kill(process, signal.SIGINT)  # Ctrl-C reaches all of a terminal's processes
            assert await tell(pool, "pid") == process
            os.kill(process, signal.SIGKILL)
            assert await asyncio.to_thread(ended, process)
            assert await tell(pool, "pid") != process

    play(scene)


@pytest.mark.parametrize("how", ["hang", "hold"])
def test_a_job_over_its_time_is_killed_with_all_it_started(how: str, tmp_path: Path) -> None:
    async def scene() -> None:
        # Long enough for a process to start on a busy machine: the time is counted from when it has the job.
        async with pool_of(timeout=3.0) as pool:
            process = await tell(pool, "pid")
            with pytest.raises(TimeoutError, match=r"episode.reward_timeout = 3 s"):
                await tell(pool, how, hello=str(tmp_path / "hello"))
            assert await tell(pool, "pid") != process
            assert ended(int(process))
            if how == "hang":
                assert all(ended(int(pid)) for pid in (tmp_path / "hello").read_text().split())

    play(scene)


def test_others_go_on_while_jobs_hang(tmp_path: Path) -> None:
    before = children()

    async def scene() -> None:
        async with pool_of(size=2) as pool:
            hanging = waits(pool, tmp_path, 3)  # one more than there are places
            for i in range(3):
                await appears(tmp_path / f"hello{i}")
            assert await tell(pool, "fine") == 1.0
            async with loop_lag() as lag:
                assert await asyncio.gather(*(tell(pool, "fine") for _ in range(500))) == [1.0] * 500
            assert lag.worst < 0.5
            assert not any(task.done() for task in hanging)
            (tmp_path / "go").touch()
            assert await asyncio.gather(*hanging) == [1.0] * 3
            while len(children() - before) > 2:  # as many are kept as were asked for
                await asyncio.sleep(0.01)

    play(scene)


def test_there_is_a_most_of_processes(tmp_path: Path) -> None:
    async def scene() -> None:
        before = children()
        async with pool_of(size=1) as pool:
            jobs = waits(pool, tmp_path, 2 * MAX_GROWTH)
            for i in range(MAX_GROWTH):
                await appears(tmp_path / f"hello{i}")
            assert len(children() - before) == MAX_GROWTH
            assert not any((tmp_path / f"hello{i}").exists() for i in range(MAX_GROWTH, 2 * MAX_GROWTH))
            (tmp_path / "go").touch()
            assert await asyncio.gather(*jobs) == [1.0] * (2 * MAX_GROWTH)

    play(scene)


def test_results_reach_their_callers_and_hold_up_nothing() -> None:
    async def scene() -> None:
        async with pool_of(SHORTER, size=2, scale=1e9) as pool:
            lengths = [i * 7919 % 1000 for i in range(400)]
            scores = await asyncio.gather(*(pool.score(SHORTER, Outcome("x" * n)) for n in lengths))
            assert scores == [1 - n / 1e9 for n in lengths]
            async with loop_lag() as lag:
                for text in ("x" * (8 << 20), "\x00\ud800\u202e" * 100_000):
                    assert await pool.score(SHORTER, Outcome(text)) == 1 - len(text) / 1e9
            assert lag.worst < 0.5

    play(scene)


def test_a_cancelled_job_ends_and_takes_no_worker_along(tmp_path: Path) -> None:
    async def scene() -> None:
        async with pool_of() as pool:
            job = asyncio.create_task(tell(pool, "hang", hello=str(tmp_path / "hello")))
            pids = (await appears(tmp_path / "hello")).split()
            job.cancel()
            with pytest.raises(asyncio.CancelledError):
                await job
            assert all([await asyncio.to_thread(ended, int(pid)) for pid in pids])
            (waiting,) = waits(pool, tmp_path, 1)
            await appears(tmp_path / "hello0")
            others = [asyncio.create_task(tell(pool, "fine")) for _ in range(20)]
            await asyncio.sleep(0)
            (tmp_path / "go").touch()
            assert await waiting == 1.0
            for other in others[::2]:
                other.cancel()
            outcomes = await asyncio.gather(*others, return_exceptions=True)
            assert outcomes[1::2] == [1.0] * 10
            assert await tell(pool, "fine") == 1.0

    play(scene)


def test_a_process_that_cannot_start_fails_all_that_wait() -> None:
    async def scene() -> None:
        name = f"{HERE}:BadStart"
        async with pool_of(name, size=2) as pool:
            errors = await asyncio.gather(*(pool.score(name, Outcome("")) for _ in range(5)), return_exceptions=True)
        assert {type(error) for error in errors} == {WorkerDied}
        assert all("RuntimeError: no model here" in str(error) for error in errors)

    play(scene)


def test_closing_waits_for_nothing(tmp_path: Path) -> None:
    async def scene() -> None:
        pool = Pool({TOLD: {}}, 1, DEADLINE)
        hanging = asyncio.create_task(tell(pool, "hang", hello=str(tmp_path / "hello")))
        await appears(tmp_path / "hello")
        waiting = asyncio.create_task(tell(pool, "fine"))
        starting = Pool({f"{HERE}:SlowStart": {}}, 1, DEADLINE)
        never = asyncio.create_task(starting.score(f"{HERE}:SlowStart", Outcome("")))
        await asyncio.sleep(0)
        async with asyncio.timeout(DEADLINE):
            await pool.close()
            await starting.close()
            outcomes = await asyncio.gather(hanging, waiting, never, tell(pool, "fine"), return_exceptions=True)
        assert [type(error) for error in outcomes] == [WorkerDied] * 4

    play(scene)


GENERATOR = """
import asyncio, sys
from generator.rewards import Outcome
from generator.rewards.pool import Pool

async def main():
    pool = Pool({sys.argv[1]: {}}, 2, 1000.0)
    jobs = (pool.score(sys.argv[1], Outcome("wait", row={"hello": path, "go": ""})) for path in sys.argv[2:])
    await asyncio.gather(*jobs)

asyncio.run(main())
"""


def test_nothing_outlives_a_generator_that_is_killed(tmp_path: Path) -> None:
    paths = [tmp_path / "one", tmp_path / "two"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    generator = subprocess.Popen([sys.executable, "-c", GENERATOR, TOLD, *map(str, paths)], env=environment)

    async def started() -> list[str]:
        async with asyncio.timeout(DEADLINE):
            return [await appears(path) for path in paths]

    try:
        pids = [int(pid) for pid in asyncio.run(started())]
    finally:
        generator.kill()
        generator.wait()
    assert all(ended(pid) for pid in pids)
