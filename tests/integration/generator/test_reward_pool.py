"""The scoring processes: a job that hangs, crashes or lies delays and harms itself alone, and nothing stays behind."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest

from common.messages import Task
from common.unpack import MAX_DEPTH
from generator.rewards import Outcome
from generator.rewards import pool as module
from generator.rewards.pool import MAX_GROWTH, Pool, RewardFailed, ScoringProcess, WorkerDied
from tests.support import some_rewards
from tests.support.event_loop import DEADLINE, in_event_loop
from tests.support.processes import children, ended

HERE = "tests.support.some_rewards"
TOLD, SHORTER = f"{HERE}:told", f"{HERE}:shorter"


def pooled(*names: str, size: int = 1, timeout: float = DEADLINE, **options: Any) -> Callable[[Any], Any]:
    """Plays a test with a pool of these rewards, which must leave no process behind."""

    def decorate(test: Any) -> Any:
        @functools.wraps(test)
        async def scene(**fixtures: Any) -> None:
            before = children()
            pool = Pool(dict.fromkeys(names or (TOLD,), options), size, timeout, memory_mb=1024)
            try:
                await test(pool, **fixtures)
            finally:
                await pool.close()
            assert children() == before

        signature = inspect.signature(test)
        scene.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])  # type: ignore[attr-defined]
        return in_event_loop(scene)

    return decorate


async def tell(pool: Pool, what: str, **row: Any) -> float:
    return await pool.score(TOLD, Outcome(what, row=row))


def all_ended(hello: Path) -> bool:
    """Whether all processes that are named in a file have ended, or soon do."""
    return all(ended(int(pid)) for pid in hello.read_text().split())


async def appears(path: Path) -> str:
    """Wait until a scoring process has written its file; returns the text."""
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
    "nan": "nan, which is not a finite number",
    "none": "NoneType",
    "text": "'1.0' (str), not a number",
    "leave": "SystemExit: 4",
    "list": "'[0.5, 0.5]' (list), not a number; allowed: a finite number",
    "tuple": "(tuple), not a number; allowed",
    "mapping": "(dict), not a number; allowed",
    "complex": "'1j' (complex), not a number",
    "list of text": "not a number",
    "list of none": "not a number",
}
GOOD = ("true", "print", "list of one", "numpy", "array", "numpy's truth", "decimal", "fraction", "scored")
FORGED = [b"", b"\xc1", b"\x91" * 60_000, b"\xdd\xff\xff\xff\xff", *map(msgpack.packb, (
    [1.0], {"job": 2}, {"job": 2, "value": float("nan")}, {"job": 2, "error": 7}, {"value": 0.5},
    {"job": 3, "value": 0.5},
))]  # fmt: skip
RAISE_LINE = inspect.getsourcelines(some_rewards._raise)[1] + 1
DEADLY = [("exit", b"", "exit code 3"), ("crash", b"", "SIGSEGV")]
DEADLY += [("forge", answer, "sent an invalid answer") for answer in FORGED]


@pooled()
async def test_a_bad_result_is_an_error_of_its_own_sample(pool: Pool) -> None:
    deepest: Any = 0
    for _ in range(MAX_DEPTH - 2):
        deepest = [deepest]
    row = Task.unpack(Task(task_id="t", prompt_id="p", prompt="p", row={"deep": deepest}).pack()).row
    process = await tell(pool, "pid")
    for what, message in BAD.items():
        with pytest.raises(RewardFailed) as caught:
            await tell(pool, what)
        assert message in str(caught.value)
        assert len(str(caught.value)) < 3000
        assert re.search(r" \(\S+some_rewards\.py:\d+\)$", str(caught.value)), "its own file and line"
    assert [await tell(pool, what) for what in GOOD] == [1.0] * len(GOOD)
    assert await tell(pool, "fine", **row) == 1.0
    assert await tell(pool, "pid") == process


@pooled(f"{HERE}:skips", f"{HERE}:asynchronous_call", TOLD)
async def test_other_trainers_rewards_run_too(pool: Pool) -> None:
    skips, asynchronous = f"{HERE}:skips", f"{HERE}:asynchronous_call"
    assert [await pool.score(skips, Outcome(text)) for text in ("", "a")] == [None, 1.0]
    assert [await pool.score(asynchronous, Outcome(text, answer="7")) for text in ("7", "8")] == [1.0, 0.0]
    with pytest.raises(RewardFailed, match=rf"KeyError: .*some_rewards\.py:{RAISE_LINE}\)$"):
        await tell(pool, "raise")


@pooled()
async def test_a_process_that_ends_or_lies_is_replaced(pool: Pool, tmp_path: Path) -> None:
    for what, answer, message in DEADLY:
        hello = tmp_path / what
        with pytest.raises(WorkerDied, match=message):
            await tell(pool, what, answer=answer, hello=str(hello))
        assert what == "forge" or all_ended(hello)
        assert await tell(pool, "fine") == 1.0


@pytest.mark.parametrize("how", ["fork", "fork in the loop"])
@pooled(timeout=10.0)
async def test_a_forked_process_does_not_answer(pool: Pool, how: str) -> None:
    process = await tell(pool, "pid")
    for leaves, code in {"leave": 4, "fine": 0, "raise": 1}.items():
        assert await tell(pool, how, leaves=leaves) == code
    assert await tell(pool, "pid") == process


@pooled(SHORTER)
async def test_an_episode_beyond_all_bounds_is_an_error(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_JOB", 1 << 20)
    with pytest.raises(RewardFailed, match=r"an episode of 2,\d+,\d+ bytes; at most 1,048,576 are"):
        await pool.score(SHORTER, Outcome("x" * (2 << 20)))
    assert await pool.score(SHORTER, Outcome("")) == 1.0


@pooled()
async def test_a_process_killed_while_idle_costs_no_sample(pool: Pool) -> None:
    process = int(await tell(pool, "pid"))
    os.kill(process, signal.SIGINT)  # Ctrl-C reaches all of a terminal's processes
    assert await tell(pool, "pid") == process
    os.kill(process, signal.SIGKILL)
    assert await asyncio.to_thread(ended, process)
    assert await tell(pool, "pid") != process


@pytest.mark.parametrize("how", ["hang", "hold"])
@pooled(timeout=3.0)
async def test_a_job_over_its_time_is_killed_with_all_it_started(pool: Pool, how: str, tmp_path: Path) -> None:
    # Long enough for a process to start on a busy machine: the time is counted from when it has the job.
    process = await tell(pool, "pid")
    with pytest.raises(TimeoutError, match=r"episode.reward_timeout = 3 s"):
        await tell(pool, how, hello=str(tmp_path / "hello"))
    assert await tell(pool, "pid") != process
    assert ended(int(process))
    if how == "hang":
        assert all_ended(tmp_path / "hello")


@pytest.mark.slow
@pooled(size=2)
async def test_others_go_on_while_jobs_hang(pool: Pool, tmp_path: Path) -> None:
    before = children()
    hanging = waits(pool, tmp_path, 3)  # one more than there are places
    for i in range(3):
        await appears(tmp_path / f"hello{i}")
    assert await tell(pool, "fine") == 1.0
    assert await asyncio.gather(*(tell(pool, "fine") for _ in range(100))) == [1.0] * 100
    assert not any(task.done() for task in hanging)
    (tmp_path / "go").touch()
    assert await asyncio.gather(*hanging) == [1.0] * 3
    while len(children() - before) > 2:  # as many are kept as were asked for
        await asyncio.sleep(0.01)


@pytest.mark.slow
@pooled(size=1)
async def test_there_is_a_most_of_processes(pool: Pool, tmp_path: Path) -> None:
    before = children()
    jobs = waits(pool, tmp_path, MAX_GROWTH + 2)
    for i in range(MAX_GROWTH):
        await appears(tmp_path / f"hello{i}")
    assert len(children() - before) == MAX_GROWTH
    assert not any((tmp_path / f"hello{i}").exists() for i in (MAX_GROWTH, MAX_GROWTH + 1))
    (tmp_path / "go").touch()
    assert await asyncio.gather(*jobs) == [1.0] * len(jobs)


@pooled(SHORTER, size=2, scale=1e9)
async def test_results_reach_their_callers(pool: Pool) -> None:
    texts = ["x" * (i * 7919 % 1000) for i in range(200)] + ["x" * (8 << 20), "\x00\ud800\u202e" * 1000]
    scores = await asyncio.gather(*(pool.score(SHORTER, Outcome(text)) for text in texts))
    assert scores == [1 - len(text) / 1e9 for text in texts]


@pooled()
async def test_a_cancelled_job_ends_and_takes_no_worker_along(pool: Pool, tmp_path: Path) -> None:
    job = asyncio.create_task(tell(pool, "hang", hello=str(tmp_path / "hello")))
    await appears(tmp_path / "hello")
    job.cancel()
    with pytest.raises(asyncio.CancelledError):
        await job
    assert await asyncio.to_thread(all_ended, tmp_path / "hello")
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


@pooled(f"{HERE}:BadStart", size=2)
async def test_a_process_that_cannot_start_fails_all_that_wait(pool: Pool) -> None:
    jobs = (pool.score(f"{HERE}:BadStart", Outcome("")) for _ in range(5))
    for error in await asyncio.gather(*jobs, return_exceptions=True):
        assert isinstance(error, WorkerDied)
        assert "RuntimeError: no model here" in str(error)


@pooled(size=2)
async def test_starts_that_fail_at_once_fail_all_that_wait(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    both = asyncio.Barrier(2)

    async def start(settings: Any) -> ScoringProcess:
        await both.wait()
        raise OSError("no memory")

    monkeypatch.setattr(ScoringProcess, "start", start)
    outcomes = await asyncio.gather(*(tell(pool, "fine") for _ in range(3)), return_exceptions=True)
    assert [str(error) for error in outcomes] == ["no memory"] * 3


@pooled()
async def test_closing_waits_for_nothing(pool: Pool, tmp_path: Path) -> None:
    hanging = asyncio.create_task(tell(pool, "hang", hello=str(tmp_path / "hello")))
    await appears(tmp_path / "hello")
    waiting = asyncio.create_task(tell(pool, "fine"))
    starting = Pool({f"{HERE}:SlowStart": {}}, 1, DEADLINE)
    never = asyncio.create_task(starting.score(f"{HERE}:SlowStart", Outcome("")))
    await asyncio.sleep(0)
    await pool.close()
    await starting.close()
    outcomes = await asyncio.gather(hanging, waiting, never, tell(pool, "fine"), return_exceptions=True)
    assert [type(error) for error in outcomes] == [WorkerDied] * 4


GENERATOR = """
import asyncio, sys
from generator.rewards import Outcome
from generator.rewards.pool import Pool

async def main():
    pool = Pool({sys.argv[1]: {}}, 2, 1000.0)
    jobs = (pool.score(sys.argv[1], Outcome("hang", row={"hello": path})) for path in sys.argv[2:])
    await asyncio.gather(*jobs)

asyncio.run(main())
"""


BESIDE = """
import asyncio, json, multiprocessing, sys
from common.config import load_config
from generator.rewards import Outcome
from generator.rewards.pool import Pool

async def main():
    pool = Pool({"my_reward:score": {}}, 1, 1000.0)
    try:
        return await pool.score("my_reward:score", Outcome(""))
    finally:
        await pool.close()

if __name__ == "__main__":
    config = load_config("run.yaml")
    from my_reward import origin
    names = ["common", "generator", "learner", "json", "torch", "my_reward"]
    with multiprocessing.get_context("spawn").Pool(1) as spawned:
        print(json.dumps([asyncio.run(main()), *spawned.map(origin, names)]))
"""
REWARD = """
from importlib.util import find_spec

def score(text, answer, row):
    return 0.5

def origin(name):
    return find_spec(name).origin
"""


def test_a_folder_with_modules_named_like_installed_ones_hides_none_of_them(tmp_path: Path) -> None:
    for name in ("common", "learner", "json", "torch", "launcher"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('of the user')")
    for name in ("generator", "sandbox_client"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('of the user')")
    (tmp_path / "run.yaml").write_text("model: {path: m}\ndata: {train: t}\n")
    (tmp_path / "my_reward.py").write_text(REWARD)
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "program.py").write_text(BESIDE)
    done = subprocess.run(
        [sys.executable, "-P", tmp_path / "scripts" / "program.py"],
        capture_output=True, text=True, cwd=tmp_path, timeout=DEADLINE, check=False,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    reward, *origins, own = json.loads(done.stdout)
    assert (reward, own) == (0.5, str(tmp_path / "my_reward.py"))
    assert not [origin for origin in origins if origin.startswith(str(tmp_path))]


def test_nothing_outlives_a_generator_that_is_killed(tmp_path: Path) -> None:
    paths = [tmp_path / "one", tmp_path / "two"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    generator = subprocess.Popen([sys.executable, "-c", GENERATOR, TOLD, *map(str, paths)], env=environment)

    async def started() -> None:
        async with asyncio.timeout(DEADLINE):
            for path in paths:
                await appears(path)

    try:
        asyncio.run(started())
    finally:
        generator.kill()
        generator.wait()
    assert all(all_ended(path) for path in paths)
