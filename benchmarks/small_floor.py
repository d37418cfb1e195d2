"""What the parts alone cost on the task of `benchmarks.small_episodes`: `python -m benchmarks.small_floor`.

CPU time a sample of a bare `AsyncLLM` with as many requests in flight, of the same with each answer scored again (as
`sampler.drift.mode: rescore` does), and of a bare DeepSpeed loop. No queue, tracker, weights or message is in it: their
sum is the least that a trainer made of these parts can take, and the cores divided by it the most samples a second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import options, pipeline, small_episodes
from common.config import Config, parse_config
from common.errors import reports_user_errors

PROMPT, ANSWER = 13, 7
ROUNDS = 20


def engine(config: Config, seconds: float, rescored: bool) -> float:
    """CPU milliseconds an answer of a bare engine."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(config.model.path)
    lines = Path(str(config.data.train)).read_text().splitlines()[:256]
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": json.loads(line)["prompt"]}], add_generation_prompt=True, return_dict=False
        )
        for line in lines
    ]
    return asyncio.run(pipeline.bare(config, seconds, prompts, rescored))[1] / 1000


def learner(config: Config) -> float:
    """CPU milliseconds a sample of a bare DeepSpeed loop, in one thread."""
    import torch

    from benchmarks.learner import bare_step
    from common.payload import Payload
    from learner.batch.plan import plan_micro_batches
    from learner.batch.tensors import Packer
    from learner.ranks.world import start
    from learner.trainer import Trainer

    torch.set_num_threads(1)
    batch, rng, length = config.sampler.batch_size, np.random.default_rng(0), PROMPT + ANSWER
    payloads: dict[int, Payload | None] = {
        index: Payload(
            rng.integers(0, 256, length).astype(np.int32),
            np.array([[PROMPT, length]], np.int32),
            -rng.random(ANSWER).astype(np.float32),
            np.array([[0, 0, ANSWER]], np.int32),
        )
        for index in range(batch)
    }
    places = plan_micro_batches([[length]] * batch, 1, 1, config.learner.token_budget).of_rank(0)
    rollouts = Packer(256).rollout_batch(0, places, payloads, rng.normal(size=batch).tolist(), [0.5] * batch)
    trainer = Trainer(config, start())
    bare_step(trainer, config, rollouts)
    used = time.process_time()
    for _ in range(ROUNDS):
        bare_step(trainer, config, rollouts)
    return 1000 * (time.process_time() - used) / (ROUNDS * batch)


@reports_user_errors
def main() -> None:
    parser = options.Parser(__doc__)
    parser.add_argument("--folder", type=Path, help="keeps task and model for the next time")
    parser.add_argument("--concurrency", type=options.positive, default=256)
    parser.add_argument("--seconds", type=options.above_zero, default=10.0, help="of an engine's measurement")
    parser.add_argument("--part", choices=["engine", "rescored", "learner"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.folder or Path(temporary)).resolve()
        if args.part:
            settings = small_episodes.config(folder, Path(temporary), 100, 1e-4, args.concurrency)
            config = parse_config(settings)
            on_engine = args.part != "learner"
            print(engine(config, args.seconds, args.part == "rescored") if on_engine else learner(config))
            return
        folder.mkdir(parents=True, exist_ok=True)
        small_episodes.make_task(folder)
        # A process each: they set up torch's threads differently.
        cost = {}
        for part in ("engine", "rescored", "learner"):
            command = [sys.executable, "-m", "benchmarks.small_floor", "--folder", str(folder), "--part", part]
            command += ["--concurrency", str(args.concurrency), "--seconds", str(args.seconds)]
            cost[part] = float(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.split()[-1])
    cores = len(os.sched_getaffinity(0))
    print("| CPU a sample, ms | |\n|---|---|")
    print(f"| bare AsyncLLM, {args.concurrency} in flight | {cost['engine']:.2f} |")
    print(f"| the same, each answer scored again | {cost['rescored']:.2f} |")
    print(f"| bare DeepSpeed loop | {cost['learner']:.2f} |")
    for part, name in (("engine", "least"), ("rescored", "least, with rescoring")):
        floor = cost[part] + cost["learner"]
        print(f"| {name}: at most {1000 * cores / floor:.0f} samples/s on {cores} cores | {floor:.2f} |")


if __name__ == "__main__":
    main()
