"""What SPO costs over its parts, side by side in one run. `python -m benchmarks.overhead`, about five minutes.

Run it on a machine that does nothing else. Each row is measured next to its limit in the same run, in turns.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from benchmarks import options, streams
from common.errors import reports_user_errors

Row = tuple[str, str, str, str, str]  # what, SPO, limit, ratio, target
PARTS = ("generator", "learner", "streams", "weights", "pause")


def rows(part: str) -> Iterator[Row]:
    """Measure one part."""
    if part == "generator":
        from benchmarks import pipeline

        result = pipeline.measure()
        what = f"generator, tokens/s ({result.concurrency} episodes, responses of {result.response})"
        yield what, f"{result.pipeline:,.0f}", f"{result.bare:,.0f} bare AsyncLLM", f"{result.ratio:.2f}", "0.90"
    elif part == "learner":
        from benchmarks import learner

        trained = learner.measure()
        what = f"learner, samples/s (batches of {trained.samples}, {trained.tokens} tokens)"
        yield what, f"{trained.learner:,.0f}", f"{trained.bare:,.0f} bare DeepSpeed", f"{trained.ratio:.2f}", "0.90"
    elif part == "streams":
        for tokens, samples, sketch, target in ((1024, 102_400, 15_300, 10_000), (8192, 20_480, 3_900, 2_500)):
            for sync in streams.SYNC:
                sent = streams.measure(tokens, samples, sync=sync)
                what = f"streams and sampler, samples/s ({tokens:,} tokens, append-only file {sync})"
                speed = f"{sent.samples_per_second:,.0f}"
                ratio = f"{sent.samples_per_second / sketch:.2f}"
                yield what, speed, f"{sketch:,} bare sketch, elsewhere", ratio, f"{target:,}/s"
    elif part == "weights":
        from benchmarks import weights

        moved = weights.measure()
        for way, rate in moved.transfers.items():
            what = f"weights, {way}, GB/s ({moved.gigabytes:.2f} GB)"
            yield what, f"{rate:.2f}", f"{moved.memory_copy:.2f} memory copy", f"{rate / moved.memory_copy:.2f}", ""
    elif part == "pause":
        from benchmarks import generator

        engine = generator.measure(rounds=1)
        what = f"engine start, s (a 1.6 M parameter model, {engine.concurrency} requests)"
        yield what, f"{engine.start:.1f}", f"{engine.bare_start:.1f} bare AsyncLLM", "", ""
        yield "pause for new weights in the middle of generation, ms", f"{1000 * engine.pause:.0f}", "", "", ""


@reports_user_errors
def main() -> None:
    """Print the table; each part runs in a process of its own, so that none warms up another."""
    parser = options.Parser(__doc__)
    parser.add_argument("parts", nargs="*", help=f"parts to measure, of: {', '.join(PARTS)} (default: all)")
    parser.add_argument("--row", choices=PARTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row:
        for row in rows(args.row):
            print("\t".join(row), flush=True)
        return
    unknown = set(args.parts) - set(PARTS)
    if unknown:
        parser.error(f"unknown part {', '.join(sorted(unknown))}; there is {', '.join(PARTS)}")
    table = Table("what", "SPO", "compared with", "ratio", "target")
    for part in args.parts or PARTS:
        command = [sys.executable, "-m", "benchmarks.overhead", "--row", part]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        for line in done.stdout.splitlines():
            if line.count("\t") == 4:
                table.add_row(*line.split("\t"))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
