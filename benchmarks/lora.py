"""LoRA beside training all weights: bytes a version, the gap between both sides' log-probs, and seconds of a load.

python -m benchmarks.lora [MODEL] [--dtype float32 bfloat16]

Without a model, the quickstart's, with random weights. A learner and a generator in one process; each version is a real
step on what the generator has just sampled, with random advantages.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import structlog
import torch

from benchmarks import options
from common.config import Config, parse_config
from common.errors import reports_user_errors
from common.payload import Payload
from generator.engine.engine import Engine
from generator.weight_updater import load_weights
from generator.weights.weight_client import WeightClient
from launcher.quickstart.tiny_model import build_model, build_tokenizer, save
from learner.batch.plan import plan_micro_batches
from learner.batch.tensors import Packer
from learner.publish.weight_server import WeightServer
from learner.ranks.world import World, start
from learner.trainer import Trainer

PROMPT, RESPONSE = 16, 48  # tokens
VARIANTS: dict[str, dict[str, Any]] = {
    "all weights": {"lr": 1e-5},
    "adapter": {"lr": 1e-4, "lora": {"serve": "adapter"}},
    "merged": {"lr": 1e-4, "lora": {"serve": "merged"}},
}


async def sample(engine: Engine, count: int, seed: int) -> tuple[list[Payload], float]:
    """Responses to random prompts, and the tokens sampled a second."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(0, len(engine.tokenizer) // 2, (count, PROMPT)).astype(np.int32)
    began = time.monotonic()
    turns = await asyncio.gather(*(engine.generate(prompt, max_tokens=RESPONSE) for prompt in prompts))
    seconds = time.monotonic() - began
    payloads = [
        Payload(
            np.concatenate([prompt, turn.token_ids]),
            np.array([[PROMPT, PROMPT + len(turn.token_ids)]], np.int32),
            turn.logprobs,
            np.asarray(turn.versions, np.int32),
        )
        for prompt, turn in zip(prompts, turns, strict=True)
    ]
    return payloads, sum(len(turn.token_ids) for turn in turns) / seconds


@torch.no_grad()
def gap(trainer: Trainer, payloads: list[Payload]) -> float:
    """Mean |log pi_learner - log pi_generator| over the sampled tokens."""
    packed = Packer(trainer.policy.vocabulary).micro_batch([(payload, 0.0) for payload in payloads])
    logprobs, _ = trainer.policy(
        packed.input_ids, packed.position_ids, packed.sequences, packed.predict, packed.targets
    )
    return float((logprobs - packed.rollout_logprobs).abs().mean())


def step(trainer: Trainer, payloads: list[Payload], version: int) -> None:
    """One optimizer step on these samples."""
    lengths = [len(payload.token_ids) for payload in payloads]
    samples = plan_micro_batches([[length] for length in lengths], 1, 1, trainer.config.learner.token_budget).of_rank(0)
    advantages = np.random.default_rng(version).normal(size=len(payloads)).tolist()
    rewards = [0.0] * len(payloads)
    held: dict[int, Payload | None] = dict(enumerate(payloads))
    trainer.train(Packer(trainer.policy.vocabulary).rollout_batch(version, samples, held, advantages, rewards))


async def measure(config: Config, world: World, versions: int, count: int) -> str:
    """A row of the table, without its first columns."""
    trainer, server = Trainer(config, world), WeightServer(config.learner.weights)
    engine = await Engine.start(config, structlog.get_logger())
    client = WeightClient(server.endpoint, config.learner.weights)
    gaps, rates, loads, sent = [], [], [], [0]
    try:
        for version in range(versions + 1):
            server.serve(server.copy(version, trainer.weights(), config.model.dtype))
            with await client.next() as weights:
                loads.append(await load_weights(engine, weights, config.learner.lora))
            whole = weights.manifest.total_bytes
            sent.append(server.sent.bytes)
            payloads, rate = await sample(engine, count, version)
            gaps.append(gap(trainer, payloads))
            rates.append(rate)
            if version < versions:
                step(trainer, payloads, version)
    finally:
        client.close()
        await engine.close()
        server.close()
    trained = sum(parameter.numel() for _, parameter in trainer.policy.named_weights())
    deltas = median(np.diff(sent)[1:])
    trainer.engine.destroy()
    return (
        f"{trained:,} | {whole:,} | {deltas:,.0f} | {max(gaps):.1e} | {median(loads[1:]) * 1000:.0f} "
        f"| {median(rates[1:]):.0f}"
    )


@reports_user_errors
def main() -> None:
    parser = options.Parser(__doc__)
    parser.add_argument("model", type=options.model, nargs="?", help="folder of a model")
    parser.add_argument("--dtype", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--rank", type=options.positive, default=16)
    parser.add_argument("--versions", type=options.at_least(2), default=5)
    parser.add_argument("--samples", type=options.positive, default=16)
    args = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    torch.set_num_threads(1)
    world = start()
    print("| | type | parameters trained | bytes a version | as a delta | largest gap | ms to load | tokens/s |")
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        if args.model is None:
            args.model = Path(folder) / "model"
            save(build_model(build_tokenizer(), seed=0), build_tokenizer(), args.model)
        for dtype in args.dtype:
            for name, learner in VARIANTS.items():
                torch.manual_seed(0)
                lora = (
                    {"lora": {"rank": args.rank, "alpha": 2 * args.rank, **learner["lora"]}}
                    if "lora" in learner
                    else {}
                )
                config = parse_config(
                    {
                        "run": {"output_dir": folder},
                        "model": {"path": str(args.model), "dtype": dtype, "max_model_len": 128},
                        "data": {"train": "none.jsonl", "max_prompt_tokens": PROMPT},
                        "sampler": {"drift": {"mode": "constant"}},
                        "generator": {"max_concurrency": args.samples},
                        "learner": learner | {"dtype": dtype, "weights": {"deltas": "on"}} | lora,
                    }
                )
                print(
                    f"| {name} | {dtype} | {asyncio.run(measure(config, world, args.versions, args.samples))} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
