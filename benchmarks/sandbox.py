"""What isolation costs: programs a second in the local sandbox, against bare subprocesses, in turns within one run.

`python -m benchmarks.sandbox`, about a minute. Both run the same program on the same interpreter with the same
environment, at the same concurrency; if other work runs too, only the ratio means something. `--lag` measures instead
how long the event loop stalls while hostile programs run.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from benchmarks import options
from common.errors import reports_user_errors
from sandbox_client import RunCodeRequest, Status
from sandbox_client.local import LocalSandbox
from sandbox_client.settings import Settings, resolve
from sandbox_client.worker.command import environment

CODE = "print(sum(range(1000)))"
HOSTILE = {
    "output": "while True: print('x' * 100_000)",
    "forks": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "memory": "import os\nfor _ in range(20): os.fork()\nx = b'x' * (100 << 20)\nimport time; time.sleep(9)",
    "files": "n = 0\nwhile True:\n    n += 1\n    open(f'/tmp/{n}', 'w').write('x' * 1000)",
}


@dataclass(frozen=True)
class Measured:
    """Programs a second, medians over the rounds, and the median of the rounds' ratios."""

    bare: float
    sandbox: float
    ratio: float
    control_group: bool


async def speed(run: Callable[[], Awaitable[object]], programs: int, concurrency: int) -> float:
    """Programs a second."""
    slots = asyncio.Semaphore(concurrency)

    async def one() -> None:
        async with slots:
            await run()

    started = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(programs)))
    return programs / (time.perf_counter() - started)


async def measure(rounds: int, programs: int, concurrency: int, cgroup: str, python: str | None) -> Measured:
    """Measure both in turns; rounds alternate in which of the two is first."""
    settings = Settings(workers=concurrency, cgroup=cgroup, python=python)
    resolved = resolve(settings)
    command = (resolved.python, "-I", "-c", CODE)
    same = environment(resolved, "/tmp")

    async def bare() -> None:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe, env=same)
        out, _ = await process.communicate()
        assert out == b"499500\n"

    async with LocalSandbox(settings) as sandbox:

        async def isolated() -> None:
            answer = await sandbox.run_code(RunCodeRequest(code=CODE, run_timeout=60))
            assert answer.status is Status.SUCCESS, answer
            assert answer.run_result is not None
            assert answer.run_result.stdout == "499500\n"

        for run in (bare, isolated):
            await speed(run, 2 * concurrency, concurrency)
        speeds: dict[str, list[float]] = {"bare": [], "isolated": []}
        for number in range(rounds):
            for run in (bare, isolated) if number % 2 else (isolated, bare):
                speeds[run.__name__].append(await speed(run, programs, concurrency))
    ratios = [isolated / bare for isolated, bare in zip(speeds["isolated"], speeds["bare"], strict=True)]
    return Measured(
        statistics.median(speeds["bare"]),
        statistics.median(speeds["isolated"]),
        statistics.median(ratios),
        sandbox.cgroup is not None,
    )


async def lag(seconds: float, concurrency: int) -> list[float]:
    """How late a timer of 1 ms is, in seconds, while hostile programs run."""
    late: list[float] = []

    async def watch() -> None:
        while True:
            deadline = asyncio.get_running_loop().time() + 0.001
            await asyncio.sleep(0.001)
            late.append(asyncio.get_running_loop().time() - deadline)

    async with LocalSandbox(Settings(workers=concurrency)) as sandbox:
        await asyncio.gather(*(sandbox.run_code(RunCodeRequest(code="1")) for _ in range(concurrency)))
        watcher = asyncio.create_task(watch())
        runs = (
            sandbox.run_code(RunCodeRequest(code=list(HOSTILE.values())[number % len(HOSTILE)], run_timeout=seconds))
            for number in range(concurrency)
        )
        await asyncio.gather(*runs)
        watcher.cancel()
    return sorted(late)


@reports_user_errors
def main() -> None:
    parser = options.Parser(__doc__)
    parser.add_argument("--rounds", type=options.positive, default=10)
    parser.add_argument("--programs", type=options.positive, default=100, help="a round")
    parser.add_argument("--concurrency", type=options.positive, default=8)
    parser.add_argument("--cgroup", default="auto", help="auto, none, or a folder")
    parser.add_argument("--python", help="interpreter of both; by default the one this runs on")
    parser.add_argument("--lag", action="store_true", help="measure the event loop's lag under hostile programs")
    args = parser.parse_args()
    if args.lag:
        late = asyncio.run(lag(5.0, args.concurrency))
        print(f"lag of the event loop: median {1000 * late[len(late) // 2]:.1f} ms, longest {1000 * late[-1]:.1f} ms")
        return
    result = asyncio.run(measure(args.rounds, args.programs, args.concurrency, args.cgroup, args.python))
    group = "in a control group" if result.control_group else "watched"
    print(f"{result.sandbox:.0f} isolated programs/s ({group}), {result.bare:.0f} bare: ratio {result.ratio:.2f}")


if __name__ == "__main__":
    main()
