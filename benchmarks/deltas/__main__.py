"""Weights as deltas: bytes a version in real training, seconds behind a slow network card, and kills in mid-transfer.

python -m benchmarks.deltas train MODEL ROLLOUTS    # real gradients; a table by learning rate
python -m benchmarks.deltas kill --kills 100        # learner, relay and generators, killed while weights travel
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from benchmarks.deltas import kill, train


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train")
    training.add_argument("model", type=Path, help="folder of a model, as `python -m benchmarks.smollm2` makes it")
    training.add_argument("rollouts", type=Path, help="rollouts/VERSION.jsonl of a run of that model, with tokens")
    training.add_argument("--lr", type=float, nargs="+", default=[1e-6, 1e-5])
    training.add_argument("--steps", type=int, default=12)
    training.add_argument("--batch", type=int, default=16, help="episodes a step")
    training.add_argument("--gbit", type=float, default=1.0, help="rate of the learner's network card")
    killing = commands.add_parser("kill")
    killing.add_argument("--kills", type=int, default=100)
    killing.add_argument("--mib", type=int, default=64, help="size of the weights")
    killing.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.command == "train":
        train.measure(args.model, args.rollouts, args.lr, args.steps, args.batch, args.gbit)
        return
    with tempfile.TemporaryDirectory() as folder:
        print(kill.run(Path(folder), args.kills, args.mib, args.seed))


if __name__ == "__main__":
    main()
