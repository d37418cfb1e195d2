"""Generator tokens per second inside the pipeline against bare `AsyncLLM` at the same concurrency.

`python -m benchmarks.pipeline`. Inside means: `spo-generator` in a process of its own takes tasks from Redis,
plays episodes, encodes and sends them with log-probs and versions, beats, and has pulled its weights. Bare means:
the same engine arguments, log-probs on, a new request whenever one ends, and nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import redis
import yaml

from benchmarks.generator import RESPONSE, save_model
from benchmarks.streams import wait_for_redis
from common.config import Config, load_config
from common.messages import Task
from common.streams.batches import BatchInbox
from common.streams.broker import Broker
from common.streams.ledger import Commit, SamplerLedger
from launcher.run.embedded_redis import find_redis_server
from tests.support.ports import free_port

RUN = "benchmark"


@dataclass(frozen=True)
class Result:
    """Sampled tokens per second."""

    concurrency: int
    mean_tokens: float
    pipeline: float
    bare: float

    @property
    def ratio(self) -> float:
        """Pipeline over bare."""
        return self.pipeline / self.bare


def measure(concurrency: int = 64, seconds: float = 10.0, rounds: int = 2) -> Result:
    """Measure both in turns, each in processes of its own, and add the rounds up."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = _prepare(folder, concurrency)
        inside, bare, lengths = [], [], []
        for _ in range(rounds):
            tokens, responses, elapsed = _inside(config, seconds)
            inside.append(tokens / elapsed)
            lengths.append(tokens / responses)
            command = [sys.executable, "-m", "benchmarks.pipeline", "--bare", str(config), "--seconds", str(seconds)]
            bare.append(float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout))
    return Result(concurrency, float(np.mean(lengths)), float(np.mean(inside)), float(np.mean(bare)))


def _prepare(folder: Path, concurrency: int) -> Path:
    save_model(folder / "model")
    config = {
        "run": {"name": RUN, "output_dir": str(folder)},
        "model": {"path": str(folder / "model"), "dtype": "float32", "max_model_len": 384},
        "data": {"train": "none.jsonl", "max_prompt_tokens": 64},
        "generator": {"max_concurrency": concurrency},
        "sampler": {"drift": {"mode": "ledger"}},
        "episode": {"max_response_tokens": RESPONSE},
        "broker": {"url": f"redis://127.0.0.1:{free_port()}/0"},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def _inside(path: Path, seconds: float) -> tuple[int, int, float]:
    """Sampled tokens, responses and seconds of a generator process that always has tasks waiting."""
    from transformers import AutoModelForCausalLM

    from learner.weight_server import WeightServer

    config = load_config(path)
    port = config.broker.url.rsplit(":", 1)[1].split("/")[0]
    arguments = ["--port", port, "--bind", "127.0.0.1", "--save", "", "--appendonly", "yes", "--dir", str(path.parent)]
    server = subprocess.Popen([find_redis_server(), *arguments], stdout=subprocess.DEVNULL)
    client = redis.Redis.from_url(config.broker.url)
    wait_for_redis(client)
    client.flushall()
    broker = Broker(client, RUN)
    weights = WeightServer(config.learner.weights)
    weights.publish(0, AutoModelForCausalLM.from_pretrained(config.model.path).named_parameters(), "float32")
    BatchInbox(broker).acquire().set_address(weights.endpoint())
    ledger = SamplerLedger(broker)
    ledger.acquire()
    generator = subprocess.Popen([sys.executable, "-m", "generator.cli", "--config", str(path)])
    try:
        sent = tokens = responses = 0
        started = 0.0
        waiting = 4 * config.generator.max_concurrency
        while not started or time.perf_counter() < started + seconds:
            headers = ledger.read(256, 200)
            # The first wave begins and ends together; what follows is the steady state.
            if not started and responses >= 2 * config.generator.max_concurrency:
                started, tokens, responses = time.perf_counter(), 0, 0
            tokens += sum(header.model_tokens for _, header in headers)
            responses += len(headers)
            waiting -= len(headers)
            new = [Task(task_id=f"t{sent + i}", prompt_id=f"p{i}", prompt=f"{i}?") for i in range(len(headers))]
            if not sent:
                new = [Task(task_id=f"t{i}", prompt_id=f"p{i}", prompt=f"{i}?") for i in range(waiting)]
            sent += len(new)
            ledger.commit(
                Commit(
                    counted=[entry_id for entry_id, _ in headers],
                    unlink=[header.task_id for _, header in headers],
                    dispatch=[(task, b"") for task in new],
                )
            )
        return tokens, responses, time.perf_counter() - started
    finally:
        generator.terminate()
        generator.wait(timeout=30)
        weights.close()
        server.kill()
        server.wait()


async def bare(config: Config, seconds: float) -> float:
    """Tokens per second of AsyncLLM itself, with as many requests in flight as the generator has episodes."""
    from generator.engine.arguments import engine_arguments, prepare_environment

    prepare_environment(config)
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_arguments(config)))
    params = SamplingParams(max_tokens=RESPONSE, logprobs=0, output_kind=RequestOutputKind.FINAL_ONLY, detokenize=False)
    prompt = TokensPrompt(prompt_token_ids=llm.get_tokenizer().encode("<|im_start|>user\n1?<|im_end|>\n"))
    done: list[int] = []
    names = iter(range(10**9))

    async def stream() -> None:
        while True:
            async for output in llm.generate(prompt, params, str(next(names))):
                done.append(len(output.outputs[0].token_ids))

    streams = [asyncio.create_task(stream()) for _ in range(config.generator.max_concurrency)]
    while len(done) < 2 * config.generator.max_concurrency:
        await asyncio.sleep(0.01)
    before, started = len(done), time.perf_counter()
    await asyncio.sleep(seconds)
    rate = sum(done[before:]) / (time.perf_counter() - started)
    for task in streams:
        task.cancel()
    llm.shutdown()
    return rate


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bare", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds of one measurement")
    parser.add_argument("--concurrency", type=int, default=64, help="requests in flight")
    args = parser.parse_args()
    if args.bare:
        print(asyncio.run(bare(load_config(args.bare), args.seconds)))
        return
    result = measure(args.concurrency, args.seconds)
    print(f"{result}\npipeline / bare AsyncLLM: {result.ratio:.3f}")


if __name__ == "__main__":
    main()
