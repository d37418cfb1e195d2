"""Weights as deltas: bytes a version in real training, seconds behind a slow network card, and kills in mid-transfer.

python -m benchmarks.deltas train MODEL ROLLOUTS    # real gradients; a table by learning rate
python -m benchmarks.deltas kill --kills 100        # learner, relay and generators, killed while weights travel
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks import options
from benchmarks.deltas import kill
from common.errors import reports_user_errors


@reports_user_errors
def main() -> None:
    parser = options.Parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train")
    training.add_argument(
        "model", type=options.model, help="a model folder, as `python -m benchmarks.smollm2` makes it"
    )
    training.add_argument("rollouts", type=options.file, help="rollouts/VERSION.jsonl of its run, with tokens")
    training.add_argument("--lr", type=options.above_zero, nargs="+", default=[1e-6, 1e-5])
    training.add_argument("--steps", type=options.positive, default=12)
    training.add_argument("--batch", type=options.positive, default=16, help="episodes a step")
    training.add_argument("--gbit", type=options.above_zero, default=1.0, help="rate of the learner's network card")
    killing = commands.add_parser("kill")
    killing.add_argument("--kills", type=options.positive, default=100)
    killing.add_argument("--mib", type=options.positive, default=64, help="size of the weights")
    killing.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.command == "train":
        # Here, for the processes of `kill` import this module, and transformers take seconds.
        from benchmarks.deltas import train

        train.measure(args.model, args.rollouts, args.lr, args.steps, args.batch, args.gbit)
        return
    with tempfile.TemporaryDirectory() as folder:
        print(kill.run(Path(folder), args.kills, args.mib, args.seed))


if __name__ == "__main__":
    main()
