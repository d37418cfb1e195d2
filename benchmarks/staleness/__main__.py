"""Runs the study's jobs, those that are not in the results file yet, and draws what came of them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import benchmarks.staleness
from benchmarks.staleness import results, study
from benchmarks.staleness.variants import BY_TOKEN, REFERENCE, REGIME, SEEDS, VARIANTS, WANTED
from common.errors import UserError

HERE = Path(__file__).parents[2]


def main() -> None:
    """Read the arguments and do what they say."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.staleness", description=benchmarks.staleness.__doc__)
    parser.add_argument("--results", type=Path, default=HERE / "benchmarks" / "results" / "staleness.jsonl")
    parser.add_argument("--jobs", type=int, default=1, help="jobs at a time, each on one core")
    parser.add_argument("--only", nargs="+", metavar="NAME", help=f"variants: {', '.join(VARIANTS)}")
    parser.add_argument("--staleness", nargs="+", type=int, default=list(WANTED), help="ages of samples, in versions")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--steps", type=int, help="learner steps of a job")
    parser.add_argument("--lr", type=float, help="learning rate")
    parser.add_argument("-o", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="for all jobs")
    parser.add_argument("--plot", type=Path, nargs="?", const=HERE / "docs" / "correction-study.png", metavar="PNG",
                        help="draw what is in the results file, and run nothing")  # fmt: skip
    given = parser.parse_args()
    unknown = [name for name in given.only or () if name not in VARIANTS]
    if unknown:
        parser.error(f"there is no variant {unknown[0]!r}; allowed: {', '.join(VARIANTS)}")
    own = [f"run.steps={given.steps}"] * bool(given.steps) + [f"learner.lr={given.lr}"] * bool(given.lr)
    chosen = {age: given.only or WANTED.get(age, list(VARIANTS)) for age in given.staleness}
    wanted = study.jobs(chosen, given.seeds, [*REGIME, *own, *given.overrides])
    try:
        if not given.plot:
            study.run_all(wanted, given.results, given.jobs)
        found = study.by_variant(wanted, given.results)
        if given.plot:
            from benchmarks.staleness.plot import plot

            plot(found, BY_TOKEN, given.plot)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(results.table(found, REFERENCE))


if __name__ == "__main__":
    main()
