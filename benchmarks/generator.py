"""Sampled tokens per second of `Engine.generate` against bare `AsyncLLM`, and the pause of a weight update.

`python -m benchmarks.generator`. Both sample 256 tokens for each request with log-probs on, in processes of their
own; bare means `AsyncLLM` as vLLM starts it from the same engine arguments. The pause is what `Engine.load`
reports while all requests are in flight.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import options
from benchmarks.turns import measured_by
from common.config import Config, parse_config
from common.errors import reports_user_errors
from common.log import get_logger

RESPONSE = 256
UPDATES = 10
# With this many token ids, a random model hardly ever samples the end of a turn.
VOCABULARY = 8192


@dataclass(frozen=True)
class GeneratorResult:
    """Tokens per second, and the median pause of an update in seconds."""

    concurrency: int
    engine: float
    bare: float
    start: float
    bare_start: float
    pause: float

    @property
    def ratio(self) -> float:
        """Engine over bare."""
        return self.engine / self.bare


def measure(concurrency: int = 64, rounds: int = 2, waves: int = 3) -> GeneratorResult:
    """Measure both in turns, each time in a process of its own; means over the rounds."""
    with tempfile.TemporaryDirectory() as name:
        save_model(Path(name))
        measurements: dict[str, list[dict[str, float]]] = {"engine": [], "bare": []}
        for _ in range(rounds):
            for side in measurements:
                arguments = "--side", side, "--model", name, "--concurrency", concurrency, "--waves", waves
                measurements[side].append(measured_by("benchmarks.generator", *arguments))

    def mean(side: str, key: str) -> float:
        return float(np.mean([figures[key] for figures in measurements[side]]))

    rates = mean("engine", "rate"), mean("bare", "rate")
    return GeneratorResult(concurrency, *rates, mean("engine", "start"), mean("bare", "start"), mean("engine", "pause"))


def save_model(folder: Path) -> None:
    """A small random Qwen3 that hardly ever ends a turn by itself."""
    from launcher.quickstart.tiny_model import build_model, build_tokenizer, save

    tokenizer = build_tokenizer()
    save(build_model(tokenizer, seed=0, vocabulary=VOCABULARY), tokenizer, folder)


def _config(folder: Path, concurrency: int) -> Config:
    return parse_config(
        {
            "model": {"path": str(folder), "dtype": "float32", "max_model_len": 384},
            "data": {"train": "none.jsonl", "max_prompt_tokens": 64},
            "generator": {"max_concurrency": concurrency},
        }
    )


async def _engine(config: Config, waves: int) -> dict[str, float]:
    from generator.engine.engine import Engine

    began = time.perf_counter()
    engine = await Engine.start(config, get_logger())
    start = time.perf_counter() - began
    rate = await engine_rate(engine, config.generator.most_episodes, waves)
    pauses = await _pauses(engine, config)
    await engine.close()
    return {"rate": rate, "start": start, "pause": float(np.median(pauses))}


async def engine_rate(engine: Any, concurrency: int, waves: int) -> float:
    """Tokens per second of an `Engine`; see `_rate`."""

    async def one(prompt: list[int]) -> int:
        return len((await engine.generate(prompt, max_tokens=RESPONSE)).token_ids)

    return await _rate(one, concurrency, waves)


async def _pauses(engine: Any, config: Config) -> list[float]:
    """Load the same weights again and again while as many requests as may be are in flight."""
    from transformers import AutoModelForCausalLM

    from generator.weights.weight_client import WeightClient
    from learner.publish.weight_server import WeightServer

    prompts = [_prompt(i) for i in range(config.generator.most_episodes)]
    requests = [asyncio.ensure_future(engine.generate(prompt, max_tokens=RESPONSE)) for prompt in prompts]
    server = WeightServer(config.learner.weights)
    client = WeightClient(server.endpoint, config.learner.weights)
    model = AutoModelForCausalLM.from_pretrained(config.model.path)
    pauses = []
    for version in range(UPDATES):
        server.serve(server.copy(version, model.named_parameters(), "float32"))
        with await client.next() as weights:
            pauses.append(await engine.load(version, weights))
        await asyncio.sleep(0.05)
    await asyncio.gather(*requests)
    client.close()
    server.close()
    return pauses


async def bare(config: Config, waves: int) -> dict[str, float]:
    """The rate of an `AsyncLLM` as vLLM starts it, in tokens per second (see `_rate`), and its start in seconds."""
    began = time.perf_counter()
    llm, one = bare_llm(config, RESPONSE)
    start = time.perf_counter() - began
    rate = await _rate(one, config.generator.most_episodes, waves)
    llm.shutdown()
    return {"rate": rate, "start": start}


def bare_llm(config: Config, response: int) -> tuple[Any, Callable[[list[int]], Awaitable[int]]]:
    """An `AsyncLLM` as vLLM starts it, and a function that samples `response` tokens for a prompt and counts them."""
    from generator.engine.arguments import engine_arguments, prepare_environment

    prepare_environment(config)
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_arguments(config)))
    params = SamplingParams(max_tokens=response, logprobs=0, output_kind=RequestOutputKind.FINAL_ONLY, detokenize=False)
    names = iter(range(10**9))

    async def one(prompt: list[int]) -> int:
        async for output in llm.generate(TokensPrompt(prompt_token_ids=prompt), params, str(next(names))):
            tokens = len(output.outputs[0].token_ids)
        return tokens

    return llm, one


async def _rate(one: Callable[[list[int]], Awaitable[int]], concurrency: int, waves: int) -> float:
    """Tokens per second over `waves` waves of `concurrency` requests, after one that warms up."""
    await asyncio.gather(*(one(_prompt(i)) for i in range(concurrency)))
    began, tokens = time.perf_counter(), 0
    for _ in range(waves):
        tokens += sum(await asyncio.gather(*(one(_prompt(i)) for i in range(concurrency))))
    return tokens / (time.perf_counter() - began)


def _prompt(seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, 20).tolist()


@reports_user_errors
def main() -> None:
    parser = options.Parser(__doc__)
    parser.add_argument("--side", choices=["engine", "bare"], help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--waves", type=options.positive, default=3, help="waves of requests in one measurement")
    parser.add_argument("--concurrency", type=options.positive, default=64, help="requests in flight")
    args = parser.parse_args()
    if args.side:
        run = _engine if args.side == "engine" else bare
        print(json.dumps(asyncio.run(run(_config(args.model, args.concurrency), args.waves))))
        return
    result = measure(args.concurrency, waves=args.waves)
    print(
        f"{result.concurrency} requests in flight: engine {result.engine:.0f} tokens/s, bare AsyncLLM "
        f"{result.bare:.0f} tokens/s, ratio {result.ratio:.3f}\n"
        f"start: engine {result.start:.1f} s, bare {result.bare_start:.1f} s\n"
        f"pause of a weight update: {1000 * result.pause:.1f} ms"
    )


if __name__ == "__main__":
    main()
