"""Runs the study's jobs, those that are not in the results file yet, and draws the results."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import benchmarks.staleness
from benchmarks.staleness import results, study
from benchmarks.staleness.variants import BY_TOKEN, DEFAULT_VARIANTS, REFERENCE, REGIME, SEEDS, VARIANTS
from common.errors import UserError

HERE = Path(__file__).parents[2]


def main() -> None:
    """Run the jobs, or plot the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.staleness", description=benchmarks.staleness.__doc__)
    parser.add_argument("--results", type=Path, default=HERE / "benchmarks" / "results" / "staleness.jsonl")
    parser.add_argument("--jobs", type=int, default=1, help="jobs at a time, each on one core")
    parser.add_argument("--only", nargs="+", metavar="NAME", help=f"variants: {', '.join(VARIANTS)}")
    parser.add_argument(
        "--staleness", nargs="+", type=int, default=list(DEFAULT_VARIANTS), help="ages of samples, in versions"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--steps", type=int, help="learner steps of a job")
    parser.add_argument("--lr", type=float, help="learning rate")
    parser.add_argument("-o", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="for all jobs")
    parser.add_argument("--plot", type=Path, nargs="?", const=HERE / "docs" / "correction-study.png", metavar="PNG",
                        help="draw what is in the results file, and run nothing")  # fmt: skip
    args = parser.parse_args()
    unknown = [name for name in args.only or () if name not in VARIANTS]
    if unknown:
        parser.error(f"there is no variant {unknown[0]!r}; allowed: {', '.join(VARIANTS)}")
    own = [f"run.steps={args.steps}"] * bool(args.steps) + [f"learner.lr={args.lr}"] * bool(args.lr)
    chosen = {age: args.only or DEFAULT_VARIANTS.get(age, list(VARIANTS)) for age in args.staleness}
    jobs = study.jobs(chosen, args.seeds, [*REGIME, *own, *args.overrides])
    try:
        if not args.plot:
            study.run_all(jobs, args.results, args.jobs)
        rows = study.by_variant(jobs, args.results)
        if args.plot:
            from benchmarks.staleness.plot import plot

            plot(rows, BY_TOKEN, args.plot)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(results.table(rows, REFERENCE))


if __name__ == "__main__":
    main()
