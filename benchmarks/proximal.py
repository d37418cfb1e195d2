"""The cost of each proximal policy, and the final accuracy of runs with it. `python -m benchmarks.proximal`.

Learner samples per second on the same batches, in turns within one run; with `--quickstart`, final held-out
accuracy of whole quickstart runs over three seeds too.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks import options
from benchmarks.learner import make_batch, make_config, make_model
from common.errors import reports_user_errors
from learner.ranks.world import start
from learner.trainer import Trainer

MODES = ("recompute", "interpolate", "rollout")


def speeds(mini_batches: int, samples: int = 128, tokens: int = 64, rounds: int = 6) -> dict[str, float]:
    """Learner samples per second by proximal policy."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder)
        world, trainers, batches = start(), {}, []
        for mode in MODES:
            config = make_config(folder, samples, {"proximal": mode}, mini_batches=mini_batches)
            trainers[mode] = Trainer(config, world)
            batches = [make_batch(config, samples, tokens, seed) for seed in range(2)]
            trainers[mode].train(batches[0])
        best = dict.fromkeys(MODES, float("inf"))
        for _ in range(rounds):
            for mode, trainer in trainers.items():
                began = time.perf_counter()
                for batch in batches:
                    trainer.train(batch)
                best[mode] = min(best[mode], time.perf_counter() - began)
        return {mode: samples * len(batches) / seconds for mode, seconds in best.items()}


def accuracies(mode: str, mini_batches: int, seeds: int) -> list[tuple[float, float]]:
    """Final held-out accuracy and learner seconds a step of quickstart runs, by seed."""
    results = []
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as folder:
            options = [f"algorithm.proximal={mode}", f"learner.mini_batches={mini_batches}"]
            flags = [flag for option in options for flag in ("-o", option)]
            command = [sys.executable, "-m", "launcher.cli", "quickstart", "--plain", "--seed", str(seed)]
            subprocess.run([*command, "--output", folder, *flags], check=True, stdout=subprocess.DEVNULL)
            summary = json.loads(next(Path(folder).glob("*/summary.json")).read_text(encoding="utf-8"))
            results.append((summary["accuracy_after"], summary["accuracy_before"]))
    return results


@reports_user_errors
def main() -> None:
    parser = options.Parser(__doc__)
    parser.add_argument("--quickstart", action="store_true", help="run quickstarts too, about five minutes")
    parser.add_argument(
        "--mini-batches", type=options.positive, nargs="+", default=[1, 4, 8], help="optimizer steps of a batch"
    )
    parser.add_argument("--seeds", type=options.positive, default=3, help="quickstarts of each mode")
    args = parser.parse_args()
    torch.set_num_threads(2)
    print("| mini-batches | " + " | ".join(MODES) + " | interpolate / recompute |\n|---|---|---|---|---|")
    for mini_batches in args.mini_batches:
        rates = speeds(mini_batches)
        shown = " | ".join(f"{rates[mode]:.0f}" for mode in MODES)
        print(f"| {mini_batches} | {shown} | {rates['interpolate'] / rates['recompute']:.2f} |", flush=True)
    if args.quickstart:
        for mode in MODES:
            runs = accuracies(mode, 4, args.seeds)
            mean = sum(after for after, _ in runs) / len(runs)
            listed = ", ".join(f"{100 * before:.1f} -> {100 * after:.1f}" for after, before in runs)
            print(f"quickstart, 4 mini-batches, {mode}: {100 * mean:.1f}% ({listed})", flush=True)


if __name__ == "__main__":
    main()
