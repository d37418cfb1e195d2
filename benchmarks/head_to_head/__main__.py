"""Makes the rows that the file of rows lacks, or shows those that it has."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import benchmarks.head_to_head
from benchmarks import options
from benchmarks.head_to_head import page, runs
from benchmarks.tables import RESULTS
from common.config import load_config
from common.errors import UserError, reports_user_errors


@reports_user_errors
def main() -> None:
    """Make the rows that the file lacks, if asked to, and print a table of all its rows."""
    parser = options.Parser(benchmarks.head_to_head.__doc__)
    parser.add_argument("what", choices=["run", "table"])
    parser.add_argument("--task", choices=[*runs.TASKS], default=runs.PRODUCTS, help="what is to be learned (products)")
    usual = [arm for arm in page.ORDER if arm != runs.BY_TOKEN]
    by_name = f"what is compared (all but {runs.BY_TOKEN!r})"
    parser.add_argument("--arms", nargs="+", default=usual, choices=page.ORDER, help=by_name)
    parser.add_argument("--seeds", nargs="+", type=options.at_least(0), default=[0, 1, 2])
    parser.add_argument("--trl", type=options.file, help=f"a Python in which TRL {runs.TRL_VERSION} is installed")
    parser.add_argument("--steps", type=options.positive, default=60)
    parser.add_argument("--every", type=options.positive, default=20, help="steps between two evaluations")
    parser.add_argument("--samples", type=options.positive, default=4, help="answers to each held-out prompt")
    parser.add_argument("--folder", type=Path, default=Path(".cache/head_to_head"), help="for the runs under way")
    parser.add_argument("--results", type=options.new_file, help="file of the rows, by default one for each task")
    parser.add_argument("--plot", type=options.new_file, metavar="PNG", help="picture to draw")
    args = parser.parse_args()
    name = "head_to_head" if args.task == runs.PRODUCTS else f"head_to_head_{args.task}"
    results = args.results or RESULTS / f"{name}.jsonl"
    common = None
    if args.what == "run":
        if args.steps % args.every:
            raise UserError(
                f"--steps {args.steps} must be a multiple of --every {args.every}: the last step is evaluated"
            )
        common = runs.settings(load_config(runs.CONFIG, runs.TASKS[args.task]), args.steps, args.every, args.samples)
    rows = runs.read_rows(results, common)
    if common is not None:
        if runs.TRL in args.arms:
            others = f"name the others: --arms {' '.join(map(shlex.quote, runs.ARMS))}"
            if args.task == runs.CORRECTION:
                raise UserError(f"the arm trl has no simulated user, but --task {args.task} needs one; {others}")
            if args.trl is None:
                raise UserError(f"the arm trl needs --trl PYTHON; or {others}")
            runs.check_trl(args.trl)
        # Seed by seed, so that an unfinished study compares like with like.
        alone = [(runs.BARE, 0)] if args.task == runs.PRODUCTS else []
        wanted = [(runs.START, 0), *alone] + [(arm, seed) for seed in args.seeds for arm in args.arms]
        missing = [job for job in wanted if not any((row["arm"], row["seed"]) == job for row in rows)]
        print(f"{len(wanted)} runs, {len(missing)} of them to do", flush=True)
        for number, (arm, seed) in enumerate(missing, 1):
            row = runs.measure(arm, seed, common, args.task, args.folder.absolute(), args.trl)
            with results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row, separators=(",", ":")) + "\n")
            ends = ", ".join(f"{step}: {page.accuracy(row, step):.1%}" for step in row.get("heldout", {}))
            print(f"[{number}/{len(missing)}] {arm}, seed {seed}{': held-out ' * bool(ends)}{ends}", flush=True)
        rows = runs.read_rows(results)
    if not rows:
        raise UserError(f"{results} has no rows; make some: python -m benchmarks.head_to_head run --task {args.task}")
    print(page.table(rows), page.passes(rows), sep="\n\n")
    if args.plot:
        page.plot(rows, args.plot)


if __name__ == "__main__":
    main()
