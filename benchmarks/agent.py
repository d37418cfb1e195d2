"""Agents on the `openai` package beside our own loop, and the endpoint beside vLLM's own server.

`python -m benchmarks.agent`. Six sides take turns at the calculator task of the quickstart, with as many episodes in
flight as a generator has:

- `loop`: episodes of our own loop, with the tool `calculator`;
- `agent`: the same episodes played by `launcher.tasks.calculator_agent`, scored like those;
- `vllm`: only the conversations, by the same package, with vLLM's own server (its app on uvicorn, unchanged);
- `logprobs`: the same with log-probs, without which nothing can be trained on;
- `endpoint`: the same conversations with our endpoint, each in a session of its own;
- `package`: the same conversations with a server that has its answers ready: the cost of the package alone.

All share one engine and one event loop. Rates are of sampled tokens. Shapes: `quickstart` is the quickstart's initial
model, which mostly answers at once; `calls` is that model after a moment of training, which calls the calculator every
time; in `long` an untrained model writes answers of 256 tokens, so that the engine's speed decides.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks import options
from benchmarks.turns import cpu_seconds, measured_by
from common.config import Config, parse_config
from common.errors import reports_user_errors
from common.log import get_logger
from common.messages import Task

SHAPES = {"quickstart": 96, "calls": 96, "long": 256}  # tokens of a response at most
# Side, the side beside it, and the least ratio of their rates.
PAIRS = (("agent", "loop", 0.85), ("endpoint", "vllm", 0.95), ("endpoint", "logprobs", 0.95))
STEPS = 20  # of training for `calls`
HOST = "127.0.0.1"
ROOM = 32  # tokens that must be left for another turn, the tool's result among them
Side = Callable[[Task], Awaitable[int]]  # plays a task; returns how many tokens were sampled


def make_model(shape: str, folder: Path) -> None:
    """Write the model of a shape."""
    from launcher.quickstart.cache import cached_model
    from launcher.tasks import find_task
    from launcher.tasks.task import QuickstartTask, Recipe

    if shape == "long":
        from benchmarks.generator import save_model

        save_model(folder)
        return
    from launcher.quickstart.warm_start import train
    from launcher.tasks import arithmetic
    from launcher.tasks.special_tokens import calculator_call
    from launcher.tasks.task import Problem, Turn

    initial = cached_model(find_task("agent"))
    if shape == "calls":

        def demonstrate(problem: Problem, rng: random.Random) -> list[Turn]:
            return [Turn(calculator_call(problem.solution[0]), problem.answer), Turn(problem.answer)]

        recipe = Recipe(steps=STEPS, rows=32, lr=1e-3, warmup=1)
        train(initial, folder, QuickstartTask("calls", "", arithmetic.problems, demonstrate, recipe=recipe))
    else:
        shutil.copytree(initial, folder, dirs_exist_ok=True)


def configuration(shape: str, model: Path, concurrency: int, agent: bool) -> Config:
    episode = {"agent": "launcher.tasks.calculator_agent:solve"} if agent else {"tools": ["calculator"]}
    limits = {"max_response_tokens": SHAPES[shape], "max_assistant_turns": 2}
    return parse_config(
        {
            "model": {"path": str(model), "dtype": "float32", "max_model_len": 384},
            "data": {"train": "none.jsonl", "max_prompt_tokens": 64},
            "generator": {"max_concurrency": concurrency},
            "episode": {**episode, **limits, "reward": "exact"},
        }
    )


async def measure(shape: str, model: Path, concurrency: int, episodes: int, turns: int) -> dict[str, list[Any]]:
    """The figures of `_rate` for each side, one per turn."""
    from generator.agents.endpoint import Endpoint
    from generator.concurrency import tune_interpreter
    from generator.engine.engine import Engine

    config = configuration(shape, model, concurrency, agent=True)
    engine = await Engine.start(config, get_logger())
    endpoint = await Endpoint.start(config, engine, get_logger())
    bare_url, stop_bare = await _serve_vllm(config, engine)
    ready = await asyncio.start_server(_answer_at_once, HOST, 0)
    sides = {
        "loop": _episodes(configuration(shape, model, concurrency, agent=False), engine, None),
        "agent": _episodes(config, engine, endpoint),
        "vllm": _with_server(bare_url, config),
        "logprobs": _with_server(bare_url, config, logprobs=True),
        "endpoint": _with_endpoint(endpoint, config),
        "package": _with_server(f"http://{HOST}:{ready.sockets[0].getsockname()[1]}", config),
    }
    tune_interpreter()
    measured: dict[str, list[Any]] = {name: [] for name in sides}
    for turn in range(turns + 1):
        for name, side in sides.items():
            figures = await _rate(side, _tasks(shape, turn), concurrency, episodes if turn else concurrency)
            if turn:  # the first one warms up
                measured[name].append(figures)
    ready.close()
    await endpoint.close()
    await stop_bare()
    await engine.close()
    return measured


def _tasks(shape: str, turn: int) -> Iterator[Task]:
    """The tasks of a turn, the same for all sides."""
    from launcher.tasks.arithmetic import problems

    rng = random.Random(f"{shape} {turn}")
    for number, problem in enumerate(problems(rng)):
        name = f"{turn}-{number}"
        yield Task(task_id=name, prompt_id=name, prompt=problem.prompt, answer=problem.answer)


def _episodes(config: Config, engine: Any, endpoint: Any) -> Side:
    """Whole episodes, scored, as a generator runs them."""
    from generator.episode.parts import RunParts
    from generator.task_runner import TaskRunner

    runner = TaskRunner(config, engine, RunParts(config), "benchmark", get_logger(), endpoint)

    async def play(task: Task) -> int:
        header, _ = await (await runner.begin(task)).run()
        return header.model_tokens

    return play


def _with_server(url: str, config: Config, **asked: Any) -> Side:
    async def play(task: Task) -> int:
        return await _converse(f"{url}/v1", "-", str(task.prompt), config, **asked)

    return play


def _with_endpoint(endpoint: Any, config: Config) -> Side:
    from generator.agents.session import SessionLimits

    limits = SessionLimits(config.episode.max_response_tokens, 2)

    async def play(task: Task) -> int:
        session = endpoint.open_session(limits)
        try:
            return await _converse(session.base_url, session.key, str(task.prompt), config)
        finally:
            await endpoint.close_session(session)

    return play


async def _converse(url: str, key: str, prompt: str, config: Config, **asked: Any) -> int:
    """What `calculator_agent.solve` does, for at most two turns; returns how many tokens were sampled."""
    from launcher.tasks.calculator_agent import CALCULATOR, CLIENT, calculate

    model = CLIENT.with_options(base_url=url, api_key=key)
    messages: list[Any] = [{"role": "user", "content": prompt}]
    tokens, limit = 0, config.episode.max_response_tokens
    for _ in range(2):
        completion = await model.chat.completions.create(
            model="policy", messages=messages, tools=[CALCULATOR], max_tokens=limit - tokens, temperature=1.0, **asked
        )
        assert completion.usage is not None
        tokens += completion.usage.completion_tokens
        reply: Any = completion.choices[0].message
        if not reply.tool_calls or tokens > limit - ROOM:
            break
        messages.append(reply)
        for call in reply.tool_calls:
            result = calculate(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return tokens


async def _answer_at_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer each request of a connection: the first of a conversation by a call, the second by a number."""
    calls = [
        {"id": "call", "type": "function", "function": {"name": "calculator", "arguments": '{"expression": "2+2"}'}}
    ]
    with contextlib.suppress(asyncio.IncompleteReadError):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            (length,) = re.findall(rb"(?i)content-length: (\d+)", head)
            second = b'"tool"' in await reader.readexactly(int(length))
            message = {"role": "assistant", **({"content": "4"} if second else {"content": None, "tool_calls": calls})}
            choice = {"index": 0, "message": message, "finish_reason": "stop" if second else "tool_calls"}
            usage = {"prompt_tokens": 20, "completion_tokens": 8, "total_tokens": 28}
            reply = {"id": "chat", "object": "chat.completion", "created": 0, "model": "policy"}
            body = json.dumps(reply | {"choices": [choice], "usage": usage}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body))
            writer.write(body)
    writer.close()


async def _serve_vllm(config: Config, engine: Any) -> tuple[str, Callable[[], Awaitable[None]]]:
    """Serve vLLM's own app around the bare engine; returns its URL, and a function that stops it."""
    import uvicorn

    from common.connections import ServerWithoutSignals
    from common.network import bound, listen
    from generator.agents.endpoint import vllm_app

    app = await vllm_app(config, engine.llm)
    listener = bound(HOST, 0)
    port = listener.getsockname()[1]
    listen(listener, HOST, port, 2048)
    server = ServerWithoutSignals(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off"))
    serving = asyncio.create_task(server.serve([listener]))

    async def stop() -> None:
        server.should_exit = True
        await serving

    return f"http://{HOST}:{port}", stop


async def _rate(side: Side, tasks: Iterator[Task], concurrency: int, episodes: int) -> dict[str, float]:
    """Tokens a second over `episodes` episodes, `concurrency` at once; CPU milliseconds and tokens an episode."""
    left, tokens = iter(range(episodes)), 0

    async def stream() -> None:
        nonlocal tokens
        for _ in left:
            sampled = await side(next(tasks))
            tokens += sampled

    this = psutil.Process()
    began, used = time.perf_counter(), cpu_seconds(this)
    await asyncio.gather(*(stream() for _ in range(concurrency)))
    seconds, used = time.perf_counter() - began, cpu_seconds(this) - used
    return {"rate": tokens / seconds, "cpu": 1000 * used / episodes, "tokens": tokens / episodes}


def table(shape: str, measured: dict[str, list[dict[str, float]]]) -> Iterator[str]:
    """Rows of Markdown: medians over the turns, and the ratios of turns with their range."""
    for side, beside, goal in PAIRS:
        ours, theirs = measured[side], measured[beside]
        ratios = sorted(one["rate"] / other["rate"] for one, other in zip(ours, theirs, strict=True))
        cpu = [other["cpu"] / one["cpu"] for one, other in zip(ours, theirs, strict=True)]
        tokens = [f"{median(one['tokens'] for one in turns):.0f}" for turns in (ours, theirs)]
        rates = [f"{median(one['rate'] for one in turns):,.0f}" for turns in (ours, theirs)]
        costs = [f"{median(one['cpu'] for one in turns):.1f}" for turns in (ours, theirs)]
        yield (
            f"| {shape}: {side} beside {beside} | {', '.join(tokens)} | {', '.join(rates)} | {median(ratios):.2f} "
            f"({ratios[0]:.2f}–{ratios[-1]:.2f}) | {goal} | {', '.join(costs)} | {median(cpu):.2f} |"
        )
    yield f"| {shape}: the package alone | | | | | {median(one['cpu'] for one in measured['package']):.1f} | |"


HEAD = (
    "| | tokens an episode | tokens/s | ratio (range) | least | CPU an episode, ms | CPU ratio |\n" + "|---" * 7 + "|"
)


@reports_user_errors
def main() -> None:
    parser = options.Parser(__doc__)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--shape", choices=SHAPES, help="only this one")
    parser.add_argument("--concurrency", type=options.positive, default=64, help="episodes in flight")
    parser.add_argument("--episodes", type=options.positive, default=512, help="of one side in one turn")
    parser.add_argument("--turns", type=options.positive, default=5)
    args = parser.parse_args()
    if args.model:
        figures = asyncio.run(measure(args.shape, args.model, args.concurrency, args.episodes, args.turns))
        print(json.dumps(figures))
        return
    print(HEAD)
    for shape in [args.shape] if args.shape else SHAPES:
        with tempfile.TemporaryDirectory() as name:
            make_model(shape, Path(name))
            sizes = "--concurrency", args.concurrency, "--episodes", args.episodes, "--turns", args.turns
            figures = measured_by("benchmarks.agent", "--shape", shape, "--model", name, *sizes)
        print("\n".join(table(shape, figures)), flush=True)


if __name__ == "__main__":
    main()
