"""Learner and generator beside the parts that they are made of, over all sizes: `python -m benchmarks.parts`.

The learner beside a bare DeepSpeed loop on the same packed batches, by tokens a sample; the generator beside bare
`AsyncLLM`, by requests in flight and tokens an answer. `--beside CHECKOUT` adds another checkout, measured in turns.

The learner has one thread. Two ratios a row, both 1 if SPO adds nothing: of rates, which need a machine that does
nothing else, and of CPU time, which counts all processes of a side and depends little on what else runs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator

from benchmarks import options
from benchmarks.tables import line, table
from benchmarks.turns import measured_by
from common.errors import reports_user_errors

LEARNER = ((64, 128), (512, 32), (4096, 4))  # tokens a sample, samples
CONCURRENCY, ANSWERS = (8, 64, 256), (8, 128, 1024)
GOAL = 0.95


def rows(quick: bool) -> Iterator[tuple[str, ...]]:
    """Names of the rows: part and sizes."""
    for tokens, samples in LEARNER:
        yield "learner", str(tokens), str(samples)
    for concurrency in CONCURRENCY:
        for answer in ANSWERS[: 2 if quick else 3]:
            yield "generator", str(concurrency), str(answer)


def measured(row: tuple[str, ...], rounds: int) -> dict[str, float]:
    """Rates of SPO and of the bare part, in samples or tokens a second, and both ratios."""
    part, first, second = row[0], int(row[1]), int(row[2])
    if part == "learner":
        import torch

        from benchmarks import learner

        # Threads that wait for each other would make both sides slow at random where other work takes a core.
        torch.set_num_threads(1)
        trained = learner.measure(second, first, rounds)
        cpu = trained.bare_cpu / trained.learner_cpu
        return {"SPO": trained.learner, "bare": trained.bare, "rates": trained.ratio, "CPU": cpu}
    from benchmarks import pipeline

    sampled = pipeline.measure(first, second, seconds=8.0, rounds=rounds)
    cpu = sampled.bare_cpu / sampled.pipeline_cpu
    return {"SPO": sampled.pipeline, "bare": sampled.bare, "rates": sampled.ratio, "CPU": cpu}


def label(row: tuple[str, ...]) -> str:
    if row[0] == "learner":
        return f"learner, samples/s: {row[2]} samples of {int(row[1]):,} tokens"
    return f"generator, tokens/s: {row[1]} in flight, answers of {int(row[2]):,} tokens"


@reports_user_errors
def main() -> None:
    parser = options.Parser(__doc__)
    parser.add_argument("--row", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--part", choices=["learner", "generator"], help="only these rows")
    parser.add_argument("--quick", action="store_true", help="without the longest answers")
    parser.add_argument("--rounds", type=options.positive, default=2)
    parser.add_argument("--beside", type=options.checkout, help="another checkout, measured in turns with this one")
    args = parser.parse_args()
    if args.row:
        print(json.dumps(measured(tuple(args.row), args.rounds)))
        return
    checkouts = {"": options.ROOT} | ({"before: ": args.beside} if args.beside else {})
    columns = [f"{name}{column}" for name in checkouts for column in ("SPO", "bare", "ratio", "ratio of CPU time")]
    print(table(["", *columns], []), flush=True)
    worst = 1.0
    for row in rows(args.quick):
        if args.part in (None, row[0]):
            cells = []
            for name, checkout in checkouts.items():
                figures = measured_by("benchmarks.parts", "--row", *row, "--rounds", args.rounds, checkout=checkout)
                cells += [f"{figures['SPO']:,.1f}", f"{figures['bare']:,.1f}"]
                cells += [f"{figures['rates']:.2f}", f"{figures['CPU']:.2f}"]
                worst = worst if name else min(worst, figures["rates"])
            print(line([label(row), *cells]), flush=True)
    print(f"\nlowest ratio {worst:.2f}; the goal is {GOAL}")


if __name__ == "__main__":
    main()
