"""What later turns of an episode save by reading keys and values of older weights, and how far their log-probs are off.

`python -m benchmarks.keep_prefix MODEL` has vLLM answer prompts, trains the model on the answers for some steps (AdamW,
float32, real gradients with random advantages), loads it, and has a second turn sampled after each answer: with what
the first weights left in the prefix cache (`generator.keep_prefix: episodes`) and without. Recorded log-probs are
compared with those that the loaded weights have for the same tokens, computed by the learner's policy.
"""

from __future__ import annotations

import asyncio
import copy
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch

from benchmarks import options
from common.config import Config, parse_config
from common.errors import reports_user_errors
from common.payload import Payload

CASES = [(1e-6, 1), (1e-6, 4), (1e-5, 1), (1e-5, 4)]  # learning rate, versions between the two turns
PROMPTS = [
    f"Here is a problem for somebody who likes numbers. A shop sells {i + 3} kinds of tea, each in {i + 2} sizes, and "
    f"of every size of every kind it has {2 * i + 1} tins on its shelves. Early in the morning {i + 1} customers come, "
    "one after the other, and each of them buys two tins. How many tins are left on the shelves then? Explain it.\n"
    for i in range(24)
]
REPLY = "\nAre you sure? Look at every step of that again, and then say the number alone.\n"
FIRST, SECOND = 96, 48  # tokens of the two turns
MICRO = 6  # conversations that are trained on at a time


def configuration(model: Path, folder: Path) -> Config:
    return parse_config(
        {
            "run": {"output_dir": str(folder)},
            "model": {"path": str(model), "dtype": "float32", "max_model_len": 512},
            "data": {"train": "none.jsonl", "max_prompt_tokens": 256},
            "generator": {"max_concurrency": len(PROMPTS), "engine": {"block_size": 32}},
            "learner": {"dtype": "float32"},
        }
    )


def logprobs(policy: Any, contexts: Sequence[np.ndarray], answers: Sequence[np.ndarray]) -> torch.Tensor:
    """Log-probs of all answers' tokens, one context after the other [N]."""
    from learner.batch.tensors import Packer

    payloads = [
        Payload(
            np.concatenate([context, answer]).astype(np.int32),
            np.array([[len(context), len(context) + len(answer)]], np.int32),
            np.zeros(len(answer), np.float32),
            np.array([[0, 0, len(answer)]], np.int32),
        )
        for context, answer in zip(contexts, answers, strict=True)
    ]
    micro = Packer(policy.vocabulary).micro_batch([(payload, 0.0) for payload in payloads])
    values: torch.Tensor = policy(micro.input_ids, micro.position_ids, micro.sequences, micro.predict, micro.targets)[0]
    return values


def train(policy: Any, prompts: Sequence[np.ndarray], answers: Sequence[np.ndarray], rate: float, steps: int) -> Any:
    """A copy of the policy after some steps."""
    trained = copy.deepcopy(policy).train()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=rate, weight_decay=0.0)
    rng = np.random.default_rng(0)
    for _ in range(steps):
        signs = rng.choice([-1.0, 1.0], len(answers))
        optimizer.zero_grad()
        for start in range(0, len(answers), MICRO):
            part = slice(start, start + MICRO)
            advantages = np.repeat(signs[part], [len(answer) for answer in answers[part]])
            values = logprobs(trained, prompts[part], answers[part])
            (-(values * torch.from_numpy(advantages).float()).sum() / sum(map(len, answers))).backward()
        optimizer.step()
    return trained.eval()


async def measure(config: Config, cases: Sequence[tuple[float, int]]) -> None:
    from generator.engine.engine import Engine
    from generator.weights.weight_client import WeightClient
    from learner.policy.model import load_policy
    from learner.publish.weight_server import WeightServer

    policy = load_policy(config).eval()
    engine = await Engine.start(config, structlog.get_logger())
    settings = config.learner.weights
    server = WeightServer(settings)
    client = WeightClient(server.endpoint, settings)
    versions = iter(range(1000))

    async def load(weights: Any) -> None:
        version = next(versions)
        server.serve(server.copy(version, weights.model.named_parameters(), "float32"))
        with await client.next() as arrived:
            await engine.load(version, arrived)

    async def answer(contexts: Sequence[np.ndarray], tokens: int, epochs: Sequence[int | None]) -> list[Any]:
        requests = zip(contexts, epochs, strict=True)
        return await asyncio.gather(
            *(engine.generate(context, max_tokens=tokens, prefix_epoch=epoch) for context, epoch in requests)
        )

    fresh: list[None] = [None] * len(PROMPTS)
    prompts = [np.asarray(engine.tokenizer.encode(text), np.int32) for text in PROMPTS]
    answers = [turn.token_ids for turn in await answer(prompts, FIRST, fresh)]
    reply = np.asarray(engine.tokenizer.encode(REPLY, add_special_tokens=False), np.int32)
    firsts = [np.concatenate([prompt, first]) for prompt, first in zip(prompts, answers, strict=True)]
    contexts = [np.concatenate([first, reply]) for first in firsts]
    read = sum(map(len, contexts))
    print("| lr | versions | kept | read again | moved | gap | 99% below | bias |\n|---|---|---|---|---|---|---|---|")
    for rate, steps in cases:
        trained = train(policy, prompts, answers, rate, steps)
        await load(policy)
        cached = [turn.prefix_epoch for turn in await answer(firsts, 1, fresh)]
        await load(trained)
        for name, epochs in (("none", fresh), ("episodes", cached)):
            turns = await answer(contexts, SECOND, epochs)
            sampled = [turn.token_ids for turn in turns]
            with torch.no_grad():
                new, old = (logprobs(weights, contexts, sampled).numpy() for weights in (trained, policy))
            gap = np.concatenate([turn.logprobs for turn in turns]) - new
            again = 1 - sum(turn.cached_tokens for turn in turns) / read
            figures = [np.abs(new - old).mean(), np.abs(gap).mean(), np.quantile(np.abs(gap), 0.99), gap.mean()]
            print(
                f"| {rate:g} | {steps} | {name} | {again:.0%} | "
                + " | ".join(f"{value:.2g}" for value in figures)
                + " |",
                flush=True,
            )
    client.close()
    server.close()
    await engine.close()


@reports_user_errors
def main() -> None:
    parser = options.Parser(__doc__)
    parser.add_argument("model", type=options.model, help="a folder with weights and tokenizer")
    parser.add_argument("--lr", type=options.above_zero, help="only the rows of this learning rate")
    parser.add_argument("--versions", type=options.positive, help="only the rows of so many versions between the turns")
    args = parser.parse_args()
    cases = [(lr, n) for lr, n in CASES if args.lr in (None, lr) and args.versions in (None, n)]
    if not cases:
        there = "; ".join(f"--lr {lr:g} --versions {versions}" for lr, versions in CASES)
        parser.error(f"there is no such row, but {there}")
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(configuration(args.model, Path(folder)), cases))


if __name__ == "__main__":
    main()
