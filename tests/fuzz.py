"""Long runs of the tests with almost valid inputs: `make fuzz`, or `python -m tests.fuzz --inputs 100000`.

Every place that reads bytes from elsewhere gets this many inputs. A failure names the seed and the input.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from tests.support.boundaries import BOUNDARIES, Broken, check


def main() -> int:
    """Run the boundaries side by side; the exit code is 1 if one of them failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=100_000, help="for each boundary")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="boundaries at a time")
    parser.add_argument("boundary", nargs="*", choices=[[], *BOUNDARIES], help="all by default")
    options = parser.parse_args()
    failed = False
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        names = options.boundary or list(BOUNDARIES)
        jobs = {name: pool.submit(check, name, options.inputs, options.seed) for name in names}
        for name, job in jobs.items():
            try:
                print(f"{name:<16}", dict(job.result()), flush=True)
            except Broken as error:
                print(f"FAILED  {error}", flush=True)
                failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
