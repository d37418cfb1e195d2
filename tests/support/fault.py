"""A run in which all but engine and learner is real, to see what becomes of episodes that cannot go on."""

from __future__ import annotations

import asyncio
import json
import subprocess
import threading
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from common.config import Config, parse_config
from common.streams import dead
from common.streams.broker import Broker
from common.streams.tasks import TaskInbox
from generator.engine.engine import Completion
from launcher.quickstart.tiny_model import build_tokenizer
from tests.integration.test_sampler_process import ended, spawn
from tests.support.episode import END, call, completion
from tests.support.generator import PretendClient, make_generator
from tests.support.sampler import NoopLearner
from tests.support.waiting import until
from tests.support.whole_run import json_lines

HERE = "tests.support.faulty_parts"
BATCH, STEPS = 8, 12
DEADLINE = 600.0  # seconds, far above what any of it takes
SLEEPING, QUICK = "import time; time.sleep(100_000)", "print(7)"


def fault_config(folder: Path, redis_url: str, sandbox_url: str, kinds: dict[str, int], **sections: Any) -> Config:
    """A run over `BATCH` * `STEPS` prompts, all of which are dispatched at once.

    Args:
        kinds: number of prompts of each kind: `stuck` calls a tool that hangs, `code` one that runs a program, `scored`
            meets a reward that hangs. The others are plain.
        sections: merged over the defaults given here.
    """
    folder.mkdir(exist_ok=True)
    names = [name for name, n in kinds.items() for _ in range(n)]
    names += ["plain"] * (BATCH * STEPS - len(names))
    (folder / "scored").mkdir(exist_ok=True)
    rows = [
        {"prompt": f"{name} {i}", "answer": "7", "number": i, "hangs": name == "scored", "folder": f"{folder}/scored"}
        for i, name in enumerate(names)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree: dict[str, dict[str, Any]] = {
        "run": {"name": "test", "steps": STEPS, "output_dir": str(folder), "journal": True},
        "model": {"path": "none", "max_model_len": 1024},
        "data": {"train": str(folder / "train.jsonl"), "max_prompt_tokens": 200},
        "sampler": {"batch_size": BATCH, "max_staleness": STEPS, "drift": {"mode": "ledger"}},
        "generator": {"max_concurrency": 16, "retry_pause": 0.1},
        "episode": {
            "max_assistant_turns": 2,
            "tools": ["code_interpreter", f"{HERE}:Stuck"],
            "reward": f"{HERE}:seven",
            "reward_workers": 1,
            "rollouts_every": 1,
        },
        "sandbox": {"url": sandbox_url},
        "broker": {"url": redis_url, "dead_after": 30},
    }
    for name, values in sections.items():
        tree[name] = tree.get(name, {}) | values
    return parse_config(tree)


class Speaker:
    """An engine that makes the calls its prompts ask for, and answers 7."""

    def __init__(self) -> None:
        self.tokenizer = build_tokenizer()
        self.version = 0
        self.program = SLEEPING

    async def generate(self, prompt_ids: Any, *, max_tokens: int, **limits: Any) -> Completion:
        prompt = self.tokenizer.decode(prompt_ids)
        text = "7"
        if "<tool_response>" not in prompt:
            kind = prompt.split("user\n")[1].split()[0]
            code = json.dumps({"code": self.program})
            text = {"stuck": call("stuck", "{}"), "code": call("code_interpreter", code)}.get(kind, text)
        await asyncio.sleep(0)
        return completion(self.tokenizer.encode(text + END, add_special_tokens=False), version=self.version)

    async def load(self, version: int, weights: Any) -> float:
        self.version = version
        return 0.0

    async def watch(self, beat: float) -> None: ...


class Log:
    """Keeps the generator's log lines."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, Any]]] = []

    def __getattr__(self, level: str) -> Callable[..., None]:
        return lambda event, **values: self.lines.append((event, values))

    def failures(self) -> dict[str, list[dict[str, Any]]]:
        """Failed attempts, by task."""
        by_task = defaultdict(list)
        for event, values in self.lines:
            if event == "episode failed":
                by_task[values["task"]].append(values)
        return by_task


class Learner(threading.Thread):
    """Takes batches until the run is over."""

    def __init__(self, broker: Broker, config: Config) -> None:
        super().__init__(daemon=True)
        self.noop = NoopLearner(broker, folder=config.run.folder)
        self.over = False

    def run(self) -> None:
        while not self.over:
            self.noop.work(block_ms=20)

    async def reached(self, version: int) -> None:
        await until(lambda: self.noop.version >= version)


class FaultRun:
    """The processes of a run, and their results."""

    def __init__(self, config: Config, broker: Broker) -> None:
        broker.dead_after = config.broker.dead_after
        self.config, self.broker = config, broker
        self.engine, self.log = Speaker(), Log()
        self.learner = Learner(broker, config)
        self.sampler: subprocess.Popen[str]
        self.code: int | None = None  # the sampler's exit code
        self.output = ""  # the sampler's

    def play(self, story: Callable[[FaultRun], Awaitable[None]], to_the_end: bool = False) -> None:
        """Run all of it until the story ends, or from then on until the run does."""
        with self._others():
            asyncio.run(self._generate(story, to_the_end))
            if to_the_end or self.sampler.poll() is not None:
                self.code, self.output = ended(self.sampler, DEADLINE)

    async def _generate(self, story: Callable[[FaultRun], Awaitable[None]], to_the_end: bool) -> None:
        self.generator = generator = make_generator(
            self.config, self.broker, TaskInbox(self.broker, "g1"), self.engine, PretendClient(0), self.log
        )
        running = asyncio.create_task(generator.run())
        try:
            async with asyncio.timeout(DEADLINE):
                await story(self)
                if to_the_end:
                    await running
        finally:
            generator.stop.set()
            await asyncio.wait_for(running, DEADLINE)

    @contextmanager
    def _others(self) -> Iterator[None]:
        self.sampler = spawn(self.config)
        self.learner.start()
        try:
            yield
        finally:
            self.sampler.kill()
            self.sampler.communicate()
            self.learner.over = True
            self.learner.join()

    def outstanding(self) -> int:
        """Tasks that were dispatched and not yet counted."""
        counters = self.broker.counters()
        return counters.get("dispatched", 0) - counters.get("counted", 0)

    def kept(self) -> dict[str, dict[str, Any]]:
        """Every training episode by its task, as the sampler wrote it to the run folder."""
        rows = json_lines(*self.config.run.folder.glob("rollouts/*.jsonl"))
        by_task = {row["task_id"]: row for row in rows}
        assert len(by_task) == len(rows)
        return by_task

    def letters(self) -> dict[str, str]:
        """Reasons in the dead letters by task."""
        letters = [letter for _, letter in dead.list_dead(self.broker, 10_000)]
        assert {letter["stream"] for letter in letters} <= {"tasks"}
        reasons = {letter["fields"][b"id"].decode(): letter["reason"] for letter in letters}
        assert len(reasons) == len(letters)
        return reasons


def kind_of(row: dict[str, Any]) -> str:
    return str(row["input"]).split()[0]


async def programs_run(url: str) -> None:
    """Wait until a sandbox server runs a program."""
    async with httpx.AsyncClient() as client:
        while "spo_sandbox_running 0.0\n" in (await client.get(f"{url}/metrics")).text:
            await asyncio.sleep(0.01)
