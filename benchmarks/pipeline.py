"""Generator tokens per second inside the pipeline against bare `AsyncLLM` at the same concurrency.

`python -m benchmarks.pipeline`. Inside means: `spo-generator` in a process of its own has pulled its weights, takes
tasks from Redis, plays episodes, encodes and sends them with log-probs and versions, and sends heartbeats. Bare means:
the same engine arguments, log-probs on, a new request whenever one ends, and nothing else. Both are measured from the
end of their first wave of requests to the end of a later one, since all answers are equally long.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import yaml

from benchmarks import options
from benchmarks.generator import RESPONSE, bare_llm, save_model
from benchmarks.streams import redis_server
from benchmarks.turns import cpu_seconds, measured_by
from common.config import Config, load_config
from common.errors import reports_user_errors
from common.messages import Task
from common.streams.batches import BatchInbox
from common.streams.broker import Broker
from common.streams.ledger import Commit, SamplerLedger
from tests.support.ports import free_port

RUN = "benchmark"


@dataclass(frozen=True)
class PipelineResult:
    """Sampled tokens per second, and CPU microseconds a token of the generator's processes and of the bare engine's."""

    concurrency: int
    response: int
    pipeline: float
    bare: float
    pipeline_cpu: float
    bare_cpu: float

    @property
    def ratio(self) -> float:
        """Pipeline over bare."""
        return self.pipeline / self.bare


def measure(concurrency: int = 64, response: int = RESPONSE, seconds: float = 10.0, rounds: int = 2) -> PipelineResult:
    """Measure both in turns, each in processes of its own; means over the rounds."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = prepare(folder, concurrency, response)
        sides = []
        for _ in range(rounds):
            alone = measured_by("benchmarks.pipeline", "--bare", config, "--seconds", seconds)
            sides.append((*_inside(config, seconds), *alone))
    rate, cpu, bare_rate, bare_cpu = np.mean(sides, axis=0).tolist()
    return PipelineResult(concurrency, response, rate, bare_rate, cpu, bare_cpu)


def prepare(folder: Path, concurrency: int, response: int) -> Path:
    """Write a model and a configuration; returns the path of the configuration."""
    save_model(folder / "model")
    settings = folder / "model" / "config.json"
    # Its weights are random anyway, and do not depend on how many positions it was made for.
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"max_position_embeddings": 8192}))
    config = {
        "run": {"name": RUN, "output_dir": str(folder)},
        "model": {"path": str(folder / "model"), "dtype": "float32", "max_model_len": response + 64},
        "data": {"train": "none.jsonl", "max_prompt_tokens": 48},
        "generator": {"max_concurrency": concurrency},
        "sampler": {"drift": {"mode": "ledger"}},
        "episode": {"max_response_tokens": response},
        "broker": {"url": f"redis://127.0.0.1:{free_port()}/0"},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


class Waves:
    """Measures rate and CPU time from the end of the first wave of responses to that of a later one.

    Args:
        seconds: the least time between the two.
    """

    def __init__(self, process: psutil.Process, concurrency: int, seconds: float) -> None:
        self._process, self._concurrency, self._seconds = process, concurrency, seconds
        self._responses = self._tokens = 0
        self._began: tuple[float, float] | None = None
        self.result: tuple[float, float] | None = None

    def add(self, tokens: int) -> None:
        """Count a response that has ended."""
        self._responses, self._tokens = self._responses + 1, self._tokens + tokens
        if self._responses % self._concurrency or self.result:
            return
        now = time.perf_counter(), cpu_seconds(self._process)
        if self._began is None:
            self._began, self._tokens = now, 0
        elif now[0] > self._began[0] + self._seconds:
            passed, used = now[0] - self._began[0], now[1] - self._began[1]
            self.result = self._tokens / passed, 1e6 * used / self._tokens


def _inside(path: Path, seconds: float) -> tuple[float, float]:
    """Tokens a second, and CPU time a token, of a generator process that always has tasks waiting."""
    from transformers import AutoModelForCausalLM

    from learner.publish.weight_server import WeightServer

    config = load_config(path)
    port = int(config.broker.url.rsplit(":", 1)[1].split("/")[0])
    model = AutoModelForCausalLM.from_pretrained(config.model.path)
    with redis_server(path.parent, port) as client:
        client.flushall()  # its file has the data of the round before
        broker = Broker(client, RUN)
        weights = WeightServer(config.learner.weights)
        weights.serve(weights.copy(0, model.named_parameters(), "float32"))
        BatchInbox(broker).acquire().set_address(weights.endpoint())
        ledger = SamplerLedger(broker)
        ledger.acquire()
        generator = subprocess.Popen([sys.executable, "-m", "generator.cli", "--config", str(path)])
        try:
            waves = Waves(psutil.Process(generator.pid), config.generator.most_episodes, seconds)
            sent, missing = 0, 4 * config.generator.most_episodes
            while waves.result is None:
                headers = ledger.read(256, 200) if sent else []
                for _, header in headers:
                    waves.add(header.model_tokens)
                missing += len(headers)
                new = [Task(task_id=f"t{sent + i}", prompt_id=f"p{i}", prompt=f"{i}?") for i in range(missing)]
                sent, missing = sent + len(new), 0
                ledger.commit(
                    Commit(
                        counted=[entry_id for entry_id, _ in headers],
                        unlink=[header.task_id for _, header in headers],
                        dispatch=[(task, b"") for task in new],
                    )
                )
            return waves.result
        finally:
            generator.terminate()
            generator.wait(timeout=30)
            weights.close()


async def _bare(config: Config, seconds: float) -> tuple[float, float]:
    """Tokens a second, and CPU time a token, of AsyncLLM with as many requests in flight as there are episodes."""
    llm, one = bare_llm(config, config.episode.max_response_tokens)
    prompt = llm.get_tokenizer().encode("<|im_start|>user\n1?<|im_end|>\n<|im_start|>assistant\n")
    waves = Waves(psutil.Process(), config.generator.most_episodes, seconds)

    async def stream() -> None:
        while waves.result is None:
            waves.add(await one(prompt))

    streams = [asyncio.create_task(stream()) for _ in range(config.generator.most_episodes)]
    await asyncio.wait(streams, return_when=asyncio.FIRST_COMPLETED)
    for task in streams:
        task.cancel()
    llm.shutdown()
    assert waves.result is not None
    return waves.result


@reports_user_errors
def main() -> None:
    parser = options.Parser(__doc__)
    parser.add_argument("--bare", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=options.above_zero, default=10.0, help="seconds of one measurement")
    parser.add_argument("--concurrency", type=options.positive, default=64, help="requests in flight")
    parser.add_argument("--response", type=options.positive, default=RESPONSE, help="tokens of an answer")
    args = parser.parse_args()
    if args.bare:
        print(json.dumps(asyncio.run(_bare(load_config(args.bare), args.seconds))))
        return
    result = measure(args.concurrency, args.response, args.seconds)
    print(f"{result}\npipeline / bare AsyncLLM: {result.ratio:.3f}")


if __name__ == "__main__":
    main()
