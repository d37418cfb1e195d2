"""Runs the study, or measures real runs."""

from __future__ import annotations

from pathlib import Path

import benchmarks.values
from benchmarks import options
from benchmarks.values import features, plot, real_runs, study
from common.errors import reports_user_errors
from launcher.tasks import TASKS

RESULTS = Path(__file__).parents[1] / "results"


@reports_user_errors
def main() -> None:
    """Run what the file of results lacks, and print a table of all it has."""
    parser = options.Parser(benchmarks.values.__doc__)
    parser.add_argument("what", choices=["study", "runs", "features", "table"])
    parser.add_argument(
        "--tasks", nargs="+", default=["arithmetic", "gym"], choices=TASKS, help="tasks of the quickstart"
    )
    parser.add_argument(
        "--visits",
        nargs="+",
        type=options.above_zero,
        help="samples over prompts; study: 1 3 10, runs: 2 15, features: 2",
    )
    parser.add_argument("--seeds", nargs="+", type=int, help="study: 0 to 4, others: 0 to 2")
    parser.add_argument(
        "--offline", nargs="+", type=options.at_least(0), default=[0, 8], help="offline scores a prompt (study)"
    )
    parser.add_argument("--methods", nargs="+", choices=study.METHODS, help="default: all without a critic (study)")
    parser.add_argument("--steps", type=options.positive, default=40, help="learner steps of a job (study, features)")
    parser.add_argument("--batch", type=options.positive, default=study.BATCH, help="samples of a step (study)")
    parser.add_argument("--jobs", type=options.positive, default=2, help="jobs at a time, each on one core (study)")
    parser.add_argument(
        "--baselines", nargs="+", default=list(real_runs.BASELINES), choices=real_runs.BASELINES, help="(runs)"
    )
    parser.add_argument(
        "--results",
        type=Path,
        help="default: values.jsonl, value_runs.jsonl or value_features.jsonl under benchmarks/results",
    )
    parser.add_argument("--plot", type=Path, help="folder for values-accuracy.png and values-variance.png (study)")
    args = parser.parse_args()
    if args.what == "runs":
        path = args.results or RESULTS / "value_runs.jsonl"
        visits, seeds = args.visits or [2, 15], args.seeds or range(3)
        rows = [row for task in args.tasks for row in real_runs.measure(task, args.baselines, visits, seeds, path)]
        print(real_runs.table(rows))
        return
    if args.what == "features":
        path = args.results or RESULTS / "value_features.jsonl"
        print(features.table(features.measure(args.visits or [2], args.seeds or range(3), args.steps, path)))
        return
    path = args.results or RESULTS / "values.jsonl"
    if args.what == "study":
        seeds = args.seeds or range(5)
        visits, methods = args.visits or [1, 3, 10], args.methods
        wanted = study.jobs(args.tasks, visits, args.offline, seeds, args.steps, methods, args.batch)
        study.run_all(wanted, path, args.jobs)
    results = study.read(path)
    print(study.table(results))
    if args.plot:
        args.plot.mkdir(parents=True, exist_ok=True)
        plot.plot_accuracy(results, args.plot / "values-accuracy.png")
        plot.plot_variance(results, args.plot / "values-variance.png")


if __name__ == "__main__":
    main()
