"""The share of a learner step that the correction and its diagnostics take: the best of several rounds, in turns.

`python -m benchmarks.correction`: a tiny model, batches of 128 samples of about 64 tokens.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from benchmarks import options
from benchmarks.learner import make_batch, make_config, make_model
from benchmarks.turns import in_turns
from common.config import CorrectionConfig
from common.errors import reports_user_errors
from learner.correction import correct_tokens
from learner.ranks.world import start
from learner.stats import Stats
from learner.trainer import Trainer

PRESET = "decoupled_k3_rs_token_tis"
SAMPLES, TOKENS = 128, 64


def measure(rounds: int) -> tuple[float, float]:
    """Seconds of a whole learner step, and of the correction of its batch."""
    with tempfile.TemporaryDirectory() as name:
        make_model(Path(name))
        config = make_config(Path(name), SAMPLES)
        trainer, preset = Trainer(config, start()), CorrectionConfig.preset(PRESET)
        batch = make_batch(config, SAMPLES, TOKENS, seed=0)

        def correction() -> None:
            for micro in (micro for micros in batch.mini_batches for micro in micros):
                stats, sampled = Stats(), micro.rollout_logprobs
                correct_tokens(sampled + 0.01, sampled, micro.layout, preset, stats, batch.version - micro.versions)
                stats.reduce()

        spent = in_turns({"step": lambda: trainer.train(batch), "correction": correction}, rounds)
    step, corrected = (min(one.wall for one in spent[side]) for side in ("step", "correction"))
    return step, corrected


@reports_user_errors
def main() -> None:
    parser = options.Parser(__doc__)
    parser.add_argument("--threads", type=options.positive, default=2, help="torch threads")
    parser.add_argument("--rounds", type=options.positive, default=10, help="the best counts")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    step, correction = measure(args.rounds)
    share = 100 * correction / step
    print(f"learner step {1e3 * step:.1f} ms, correction and diagnostics in it {1e3 * correction:.2f} ms: {share:.2f}%")


if __name__ == "__main__":
    main()
