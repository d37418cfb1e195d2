"""Runs the study's jobs, those that are not in the results file yet, and draws the results."""

from __future__ import annotations

import sys
from pathlib import Path

import benchmarks.staleness
from benchmarks import options
from benchmarks.staleness import results, study
from benchmarks.staleness.variants import AGES, GROUPS, REFERENCE, REGIME, SEEDS, VARIANTS, variants_at
from common.errors import UserError, reports_user_errors

HERE = Path(__file__).parents[2]


@reports_user_errors
def main() -> None:
    """Run the jobs, or plot the results."""
    parser = options.Parser(benchmarks.staleness.__doc__)
    parser.add_argument("--results", type=options.new_file, default=HERE / "benchmarks" / "results" / "staleness.jsonl")
    parser.add_argument("--jobs", type=options.positive, default=1, help="jobs at a time, each on one core")
    parser.add_argument("--only", nargs="+", metavar="NAME", help=f"variants: {', '.join(VARIANTS)}")
    ages = "ages of samples, in versions"
    parser.add_argument("--staleness", nargs="+", type=options.at_least(0), default=AGES, metavar="AGE", help=ages)
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--steps", type=options.positive, help="learner steps of a job")
    parser.add_argument("--lr", type=options.above_zero, help="learning rate")
    parser.add_argument("-o", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="for all jobs")
    picture, plotted = HERE / "docs" / "correction-study.png", "draw what is in the results file, and run nothing"
    parser.add_argument("--plot", type=options.new_file, nargs="?", const=picture, metavar="PNG", help=plotted)
    args = parser.parse_args()
    unknown = [name for name in args.only or () if name not in VARIANTS]
    if unknown:
        parser.error(f"there is no variant {unknown[0]!r}; allowed: {', '.join(VARIANTS)}")
    own = [f"run.steps={args.steps}"] * bool(args.steps) + [f"learner.lr={args.lr}"] * bool(args.lr)
    chosen = {age: args.only or variants_at(age) for age in args.staleness}
    jobs = study.jobs(chosen, args.seeds, [*REGIME, *own, *args.overrides])
    try:
        if not args.plot:
            study.run_all(jobs, args.results, args.jobs)
        rows = study.by_variant(jobs, args.results)
        if args.plot:
            from benchmarks.staleness.plot import plot

            plot(rows, GROUPS, REFERENCE, args.plot)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(results.table(rows, GROUPS))


if __name__ == "__main__":
    main()
