"""How far generator and learner are apart on the same weights in bfloat16, by the type of their logits.

`python -m benchmarks.head_dtype MODEL` samples with vLLM and computes the same tokens' log-probs in the learner, once
with `model.head_dtype: float32` and once with `model`, and prints the spread of log pi_learner - log pi_generator.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import structlog
import torch

from benchmarks import options
from common.config import Config, parse_config
from common.errors import reports_user_errors
from common.payload import Payload

PROMPTS = [f"Question {i}: what is {i} times {i + 3}, and why?" for i in range(32)]
TOKENS = 64


def configuration(model: Path, head: str, folder: Path) -> Config:
    return parse_config(
        {
            "run": {"output_dir": str(folder)},
            "model": {"path": str(model), "dtype": "bfloat16", "head_dtype": head, "max_model_len": 256},
            "data": {"train": "none.jsonl", "max_prompt_tokens": 128},
            "generator": {"max_concurrency": len(PROMPTS)},
            "learner": {"dtype": "bfloat16"},
        }
    )


async def sample(config: Config) -> list[Payload]:
    """One response to each prompt, with the engine's log-probs."""
    from generator.engine.engine import Engine

    engine = await Engine.start(config, structlog.get_logger())
    try:
        prompts = [np.asarray(engine.tokenizer.encode(text), np.int32) for text in PROMPTS]
        turns = await asyncio.gather(*(engine.generate(prompt, max_tokens=TOKENS) for prompt in prompts))
    finally:
        await engine.close()
    return [
        Payload(
            np.concatenate([prompt, turn.token_ids]),
            np.array([[len(prompt), len(prompt) + len(turn.token_ids)]], np.int32),
            turn.logprobs,
            np.asarray(turn.versions, np.int32),
        )
        for prompt, turn in zip(prompts, turns, strict=True)
    ]


def gaps(config: Config) -> np.ndarray:
    """log pi_learner - log pi_generator of every sampled token [N]."""
    from learner.batch.tensors import Packer
    from learner.policy.model import load_policy

    payloads = asyncio.run(sample(config))
    policy = load_policy(config).to(torch.bfloat16).eval()
    packed = Packer(policy.vocabulary).micro_batch([(payload, 0.0) for payload in payloads])
    with torch.no_grad():
        logprobs, _ = policy(packed.input_ids, packed.position_ids, packed.sequences, packed.predict, packed.targets)
    return (logprobs - packed.rollout_logprobs).numpy()


@reports_user_errors
def main() -> None:
    parser = options.Parser(__doc__)
    parser.add_argument("model", type=options.model, help="a folder with weights and tokenizer")
    parser.add_argument("--head", choices=["float32", "model"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.head:
        with tempfile.TemporaryDirectory() as folder:
            gap = gaps(configuration(args.model, args.head, Path(folder)))
        size = np.abs(gap)
        figures = [len(gap), gap.std(), size.mean(), np.quantile(size, 0.99), size.max(), np.exp(gap).std()]
        sys.stdout.write(json.dumps([float(value) for value in figures]) + "\n")
        return
    print("| logits in | tokens | standard deviation | mean size | 99% below | largest | deviation of the ratio |")
    print("|---|---|---|---|---|---|---|")
    for head in ("model", "float32"):
        # An engine is not started twice in one process.
        command = [sys.executable, "-m", "benchmarks.head_dtype", str(args.model), "--head", head]
        ran = subprocess.run(command, capture_output=True, text=True)
        if ran.returncode:
            sys.exit(ran.stderr[-2000:])
        count, *figures = json.loads(ran.stdout.splitlines()[-1])
        print(f"| {head} | {count:.0f} | " + " | ".join(f"{figure:.5f}" for figure in figures) + " |", flush=True)


if __name__ == "__main__":
    main()
