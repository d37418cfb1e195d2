"""Learner samples per second against a bare DeepSpeed loop on the same packed batches. `python -m benchmarks.learner`.

The bare loop has the same engine, model, attention and log-prob head, and does the minimum needed to train: forward,
mean of advantage times log-prob, backward, step. What the learner adds is SPO: correction, clipped loss over
rows, diagnostics, metrics.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks import options
from benchmarks.turns import in_turns
from common.config import Config, parse_config
from common.errors import reports_user_errors
from common.payload import Payload
from launcher.quickstart.tiny_model import build_model, build_tokenizer, save
from learner.batch.plan import plan_micro_batches
from learner.batch.tensors import Packer, RolloutBatch
from learner.policy.engine import optimizer_step
from learner.ranks.world import start
from learner.trainer import Trainer


@dataclass(frozen=True)
class LearnerResult:
    """Samples per second of the two loops, and CPU milliseconds a sample."""

    samples: int
    tokens: int
    learner: float
    bare: float
    learner_cpu: float
    bare_cpu: float

    @property
    def ratio(self) -> float:
        """Learner over the bare loop."""
        return self.learner / self.bare


def measure(samples: int = 128, tokens: int = 64, rounds: int = 8) -> LearnerResult:
    """Time the loops in turns, so that other load on the machine affects both."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder)
        config = make_config(folder, samples)
        world = start()
        trainer, bare = Trainer(config, world), Trainer(config, world)
        batches = [make_batch(config, samples, tokens, seed) for seed in range(4)]
        ours, theirs = itertools.cycle(batches), itertools.cycle(batches)
        loops: dict[str, Callable[[], object]] = {
            "learner": lambda: trainer.train(next(ours)),
            "bare": lambda: bare_step(bare, config, next(theirs)),
        }
        steps, done = in_turns(loops, rounds * len(batches)), samples * len(batches) * rounds
        rates = (done / sum(step.wall for step in steps[label]) for label in loops)
        cpu = (1000 * sum(step.cpu for step in steps[label]) / done for label in loops)
        return LearnerResult(samples, tokens, *rates, *cpu)


def make_model(folder: Path) -> None:
    """A tiny random model in `folder/model`."""
    tokenizer = build_tokenizer()
    save(build_model(tokenizer, seed=0), tokenizer, folder / "model")


def make_config(folder: Path, samples: int) -> Config:
    """A configuration that trains it in float32."""
    return parse_config(
        {
            "run": {"steps": 10_000, "output_dir": str(folder)},
            "model": {"path": str(folder / "model"), "dtype": "float32", "max_model_len": 1024},
            "data": {"train": "none.jsonl", "max_prompt_tokens": 64},
            "sampler": {"batch_size": samples},
            "learner": {"dtype": "float32", "lr": 1e-4, "token_budget": 8192},
            # Log-probs made up at random would all be rejected by the recommended correction.
            "algorithm": {"correction": {"preset": "decoupled_token_is"}},
        }
    )


def make_batch(
    config: Config, samples: int, tokens: int, seed: int, device: torch.device | str = "cpu"
) -> RolloutBatch:
    """Random samples of `tokens` tokens on average, two thirds of them the model's."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(tokens // 2, tokens * 3 // 2, samples)
    payloads: dict[int, Payload | None] = {}
    for index, length in enumerate(lengths.tolist()):
        prompt = length // 3
        payloads[index] = Payload(
            rng.integers(0, 256, length).astype(np.int32),
            np.array([[prompt, length]], np.int32),
            -rng.random(length - prompt).astype(np.float32),
            np.array([[0, 0, length - prompt]], np.int32),
        )
    rows, learner = lengths[:, None].tolist(), config.learner
    places = plan_micro_batches(rows, learner.mini_batches, 1, learner.token_budget).of_rank(0)
    advantages = rng.normal(size=samples).tolist()
    return Packer(256, device).rollout_batch(0, places, payloads, advantages, [0.5] * samples)


def bare_step(trainer: Trainer, config: Config, batch: RolloutBatch) -> None:
    """Forward, mean of advantage times log-prob, backward, step."""
    engine = trainer.engine
    for micros in batch.mini_batches:
        total = sum(micro.model_tokens for micro in micros)
        for number, micro in enumerate(micros):
            engine.set_gradient_accumulation_boundary(number == len(micros) - 1)
            logprobs, _ = engine(micro.input_ids, micro.position_ids, micro.sequences, micro.predict, micro.targets)
            engine.backward(-(micro.advantages * logprobs).sum() / total)
        optimizer_step(engine, config.learner)


@reports_user_errors
def main() -> None:
    parser = options.Parser(__doc__)
    parser.add_argument("--samples", type=options.positive, default=128, help="samples of a batch")
    parser.add_argument("--tokens", type=options.at_least(4), default=64, help="mean tokens of a sample")
    parser.add_argument("--rounds", type=options.positive, default=8)
    args = parser.parse_args()
    torch.set_num_threads(2)
    result = measure(args.samples, args.tokens, args.rounds)
    print(f"{result}\nlearner / bare DeepSpeed: {result.ratio:.3f}")


if __name__ == "__main__":
    main()
