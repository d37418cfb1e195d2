"""The long mode of the tests with inputs that are almost right: `make fuzz`, or `python -m tests.fuzz --inputs 100000`.

Every place where bytes from elsewhere are read gets so many inputs. It may refuse them as it documents and in no other
way, and none may cost more memory than `boundaries.MOST_MEMORY`. A failure names the seed and the input.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from tests.support.boundaries import BOUNDARIES, Broken, check


def measure(name: str, inputs: int, seed: int) -> str:
    """One boundary, as a line of the table."""
    began = time.monotonic()
    outcomes = check(name, inputs, seed)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    return (
        f"{name:<16}{inputs:>9,}{outcomes['read']:>9,}{outcomes['refused']:>9,}{outcomes['MiB']:>9,}{peak:>9,}"
        f"{time.monotonic() - began:>8.0f}"
    )


def main() -> int:
    """Run the boundaries side by side; the exit code is 1 if one of them failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=100_000, help="for each boundary")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="boundaries at a time")
    parser.add_argument("boundary", nargs="*", choices=[[], *BOUNDARIES], help="all by default")
    options = parser.parse_args()
    names = options.boundary or list(BOUNDARIES)
    print(f"{'boundary':<16}{'inputs':>9}{'read':>9}{'refused':>9}{'most MiB':>9}{'RSS MiB':>9}{'seconds':>8}")
    failed = False
    # A process for each, so that the memory is its own.
    with ProcessPoolExecutor(options.jobs, get_context("spawn"), max_tasks_per_child=1) as pool:
        for job in [pool.submit(measure, name, options.inputs, options.seed) for name in names]:
            try:
                print(job.result(), flush=True)
            except Broken as error:
                print(f"FAILED  {error}", flush=True)
                failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
