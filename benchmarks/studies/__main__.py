"""Prints the table of a study, and draws it if asked."""

from __future__ import annotations

import benchmarks.studies
from benchmarks import options
from benchmarks.studies import group_free, staleness, teacher, values
from benchmarks.tables import RESULTS, read_rows
from common.errors import reports_user_errors

TABLES = {
    "values": values.table,
    "critic": values.table,
    "value_runs": values.runs_table,
    "value_features": values.features_table,
    "staleness": staleness.table,
    "teacher": teacher.table,
    "group_free": group_free.table,
}
PLOTS = {
    "values": values.plot_accuracy,
    "critic": values.plot_accuracy,
    "staleness": staleness.plot,
    "group_free": group_free.plot,
}


@reports_user_errors
def main() -> None:
    parser = options.Parser(benchmarks.studies.__doc__)
    parser.add_argument("study", choices=TABLES)
    parser.add_argument("--plot", type=options.new_file, metavar="PNG", help=f"picture to draw, of {', '.join(PLOTS)}")
    parser.add_argument("--variance", type=options.new_file, metavar="PNG", help="of values: variance against visits")
    args = parser.parse_args()
    if args.plot and args.study not in PLOTS:
        parser.error(f"--plot: {args.study} has no picture; allowed: {', '.join(PLOTS)}")
    if args.variance and args.study != "values":
        parser.error(f"--variance: {args.study} has no such picture; allowed: values")
    rows = read_rows(RESULTS / f"{args.study}.jsonl")
    print(TABLES[args.study](rows))
    if args.plot:
        PLOTS[args.study](rows, args.plot)
    if args.variance:
        values.plot_variance(rows, args.variance)


if __name__ == "__main__":
    main()
