"""What a turn of an episode costs besides the engine: many episodes at once in one process, with slow tools.

`python -m benchmarks.episodes`. The engine answers at once with tokens that were made before; a tool sleeps for a
time drawn from a lognormal distribution, so that most are quick and some are very slow. What is left is what a
turn costs: reading the tokens, finding and checking the call, running it, rendering and tokenising the result.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks import options
from common.config import parse_config
from common.errors import reports_user_errors
from common.messages import Task
from generator.concurrency import tune_interpreter
from generator.engine.engine import Completion
from generator.episode.parts import EpisodeParts
from generator.episode.runner import EpisodeRunner
from launcher.quickstart.tiny_model import TURN_END, build_tokenizer

HERE = "benchmarks.episodes"
MEDIAN, SIGMA, LONGEST = 0.05, 1.5, 5.0  # seconds of a call, spread of their logarithm, seconds
OUTPUT = "Traceback (most recent call last): something went wrong in line 7 of what you sent. "


class Slow:
    """Answers with some text after a while."""

    name = "slow"
    description = "Takes its time."
    schema = {  # noqa: RUF012
        "type": "object",
        "properties": {"text": {"type": "string"}, "count": {"type": "integer"}},
        "required": ["text"],
        "additionalProperties": False,
    }

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    async def call(self, text: str, count: int = 1) -> str:
        await asyncio.sleep(min(LONGEST, MEDIAN * self._random.lognormvariate(0, SIGMA)))
        return OUTPUT * 3


class SlowInterpreter(Slow):
    """The same, for programs."""

    name = "code_interpreter"
    schema = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}  # noqa: RUF012

    async def call(self, code: str) -> str:  # type: ignore[override]
        return await super().call(code)


class NoEngine:
    """Answers each turn with the same tokens, which call the tool; only the last turn calls nothing.

    A turn's seed is its episode's, a multiple of `turns`, plus the number of turns before it: so it tells which turn of
    the episode it is.
    """

    def __init__(self, tokenizer: Any, calling: np.ndarray, answer: np.ndarray, turns: int) -> None:
        self.tokenizer = tokenizer
        self._turns = [self._completion(calling)] * (turns - 1) + [self._completion(answer)]

    async def generate(self, prompt_ids: np.ndarray, *, max_tokens: int, seed: int, **limits: Any) -> Completion:
        return self._turns[seed % len(self._turns)]

    @staticmethod
    def _completion(ids: np.ndarray) -> Completion:
        return Completion(ids, np.full(len(ids), -1.0, np.float32), [(0, 0, len(ids))], "stop")


@dataclass(frozen=True)
class EpisodesResult:
    """Figures of one run.

    Attributes:
        cpu: CPU seconds a turn, that is an assistant turn together with the tool turn that follows it.
        wall: seconds in all.
    """

    episodes: int
    turns: int
    cpu: float
    wall: float


def measure(call_format: str = "hermes", episodes: int = 1000, turns: int = 8, tokens: int = 300) -> EpisodesResult:
    """Play all episodes at once; each turn samples `tokens` tokens or some more."""
    tokenizer = build_tokenizer()
    thought = "so " * (tokens // 3)
    if call_format == "code":
        call, tool = f"{thought}<code>\n```python\nprint(12 * 7)\n```\n</code>", "SlowInterpreter"
    else:
        arguments = '{"text": "12 * 7", "count": 3}'
        call = f'{thought}<tool_call>\n{{"name": "slow", "arguments": {arguments}}}\n</tool_call>{TURN_END}'
        tool = "Slow"
    calling, answer = (
        np.asarray(tokenizer.encode(text, add_special_tokens=False), np.int32)
        for text in (call, f"{thought}84{TURN_END}")
    )
    config = parse_config(
        {
            "model": {"path": "none", "max_model_len": 1 << 20},
            "data": {"train": "none", "max_prompt_tokens": 1000},
            "episode": {
                "max_assistant_turns": turns,
                "max_response_tokens": 1 << 20,
                "max_tool_text": 256,
                "tools": [f"{HERE}:{tool}"],
                "call_format": call_format,
                "tool_timeout": 2 * LONGEST,
            },
        }
    )
    engine: Any = NoEngine(tokenizer, calling, answer, turns)
    runner = EpisodeRunner(config, engine, EpisodeParts(config))
    # As in a generator.
    tune_interpreter()
    return asyncio.run(_play(runner, episodes, turns))


async def _play(runner: EpisodeRunner, episodes: int, turns: int) -> EpisodesResult:
    tasks = [Task(task_id=str(i), prompt_id=str(i), prompt="What is 12 * 7?") for i in range(episodes)]
    wall, cpu = time.perf_counter(), time.process_time()
    played = await asyncio.gather(*(runner.run(task, seed=i * turns) for i, task in enumerate(tasks)))
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    assert {(episode.reason, episode.turns) for episode in played} == {("stop", turns)}
    return EpisodesResult(episodes, episodes * turns, cpu / (episodes * turns), wall)


@reports_user_errors
def main() -> None:
    """Print a line for each call format."""
    parser = options.Parser(__doc__)
    parser.add_argument("--episodes", type=options.positive, default=1000)
    parser.add_argument("--turns", type=options.positive, default=8)
    parser.add_argument("--tokens", type=options.positive, default=300, help="sampled in a turn")
    args = parser.parse_args()
    for call_format in ("hermes", "code"):
        result = measure(call_format, args.episodes, args.turns, args.tokens)
        print(
            f"{call_format}: {result.episodes} episodes at once, {result.turns} turns in {result.wall:.1f} s: "
            f"{1000 * result.cpu:.2f} ms of CPU a turn (at most 1 wanted)"
        )


if __name__ == "__main__":
    main()
