"""A generator around a pretend engine, and the sampler's view of its results."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable, Container, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import structlog

from common.config import Config, parse_config
from common.log import Timeline
from common.messages import SampleHeader
from common.payload import open_record
from common.process import in_thread
from common.streams.broker import Broker
from common.streams.ledger import Commit, SamplerLedger
from common.streams.presence import Presence
from common.streams.tasks import TaskInbox
from common.weights.memory import TransferStats
from generator.engine.counts import EngineCounts
from generator.engine.engine import Completion, EngineDied
from generator.episode.parts import RunParts
from generator.loop import Generator
from generator.metrics import GeneratorMetrics
from generator.services import Services
from generator.teacher.server import TeacherServer
from tests.support.episode import TOKENIZER, completion
from tests.support.streams import tasks

DEADLINE = 600.0


class PretendEngine:
    """Answers each prompt with `turn`, by default 7; `fail` may raise instead, `hold` makes it wait."""

    def __init__(self) -> None:
        self.tokenizer = TOKENIZER
        self.version = 0
        self.calls = 0
        self.sampling: list[dict[str, Any]] = []
        self.scored: list[int] = []
        self.fail: Callable[[int], None] = lambda call: None
        self.turn: Callable[[Any], Completion] = saying("7<|im_end|>")
        self.hold = asyncio.Event()
        self.hold.set()
        self.died = False

    async def generate(self, prompt_ids: Any, *, max_tokens: int, **sampling: Any) -> Completion:
        self.calls += 1
        self.sampling.append(sampling)
        call = self.calls
        await self.hold.wait()
        self.fail(call)
        turn = self.turn(prompt_ids)
        return dataclasses.replace(turn, versions=[(self.version, 0, len(turn.token_ids))])

    async def logprobs(self, token_ids: Any) -> np.ndarray:
        self.scored.append(len(token_ids))
        return np.full(len(token_ids), -0.75, np.float32)

    async def load(self, version: int, weights: Any) -> float:
        self.version = version
        return 0.0

    async def watch(self, beat: float) -> None:
        while not self.died:
            await asyncio.sleep(beat)
        raise EngineDied("gone")


def saying(*turns: str | Exception) -> Callable[[Any], Completion]:
    """An engine's turns: these texts and errors, over and over."""
    left = list(turns)

    def turn(prompt_ids: Any) -> Completion:
        left.append(text := left.pop(0))
        if isinstance(text, Exception):
            raise text
        return completion(TOKENIZER.encode(text, add_special_tokens=False))

    return turn


def failing(error: BaseException, calls: Container[int] = range(1000)) -> Callable[..., Any]:
    """Raises an error in these calls, by default in all."""

    def fail(call: Any = 1, *_: Any) -> None:
        if not isinstance(call, int) or call in calls:
            raise error

    return fail


class PretendClient:
    """Serves the versions a test puts into `queue`, unless it is held."""

    def __init__(self, *versions: int) -> None:
        self.stats = TransferStats()
        self.free = asyncio.Event()
        self.free.set()
        self.queue: asyncio.Queue[int] = asyncio.Queue()
        for version in versions:
            self.queue.put_nowait(version)

    async def next(self) -> Any:
        version = await self.queue.get()
        await self.free.wait()
        no_check = SimpleNamespace(check_token_ids=[])
        return SimpleNamespace(version=version, manifest=no_check, close=lambda: None)

    def hold(self) -> bool:
        self.free.clear()
        return True

    def release(self) -> None:
        self.free.set()


def config(**sections: Any) -> Config:
    base: dict[str, Any] = {
        "model": {"path": "m", "max_model_len": 512},
        "data": {"train": "t", "max_prompt_tokens": 64},
        "generator": {"max_concurrency": 4, "max_attempts": 2, "retry_pause": 0},
        "broker": {"dead_after": 0.1},
    }
    return parse_config(base | sections)


def make_generator(
    config: Config, broker: Broker, inbox: TaskInbox, engine: Any, weights: Any, log: Any, **more: Any
) -> Generator:
    presence, parts = Presence(broker, inbox.consumer, "generator"), RunParts(config)
    metrics = GeneratorMetrics(Timeline(None, ""), EngineCounts(), gpus=0)
    return Generator(config, Services(broker, inbox, presence, engine, weights, parts, metrics, log, **more))


class Rig:
    """A generator around a pretend engine, and the sampler's view of its results."""

    def __init__(
        self,
        broker: Broker,
        engine: PretendEngine | None = None,
        teachers: Mapping[str, TeacherServer] = MappingProxyType({}),
        **sections: Any,
    ) -> None:
        self.broker, self.config = broker, config(**sections)
        self.ledger = SamplerLedger(broker, "sampler")
        self.ledger.acquire()
        self.engine, self.client = engine or PretendEngine(), PretendClient(0)
        self.inbox = TaskInbox(broker, "g1")
        self.generator = make_generator(
            self.config, broker, self.inbox, self.engine, self.client, structlog.get_logger(), teachers=teachers
        )

    def dispatch(self, n: int, **changes: Any) -> None:
        self.ledger.commit(Commit(dispatch=[(task.model_copy(update=changes), b"") for task in tasks(n)]))

    async def headers(self, n: int) -> list[Any]:
        """Wait until `n` headers have arrived. Uses none of asyncio's own threads."""
        arrived: list[Any] = []
        async with asyncio.timeout(DEADLINE):
            while len(arrived) < n:
                read = await in_thread(self.ledger.read, 256, 20)
                self.ledger.commit(Commit(counted=[entry_id for entry_id, _ in read]))
                arrived += [header for _, header in read]
        return arrived

    def play(self, story: Callable[[Rig], Any]) -> Any:
        """Run the generator while a story unfolds, then stop it; an error that ends the generator ends the story."""

        async def scene() -> Any:
            self.engine.hold = asyncio.Event()
            self.engine.hold.set()
            running, telling = asyncio.create_task(self.generator.run()), asyncio.ensure_future(story(self))
            await asyncio.wait({running, telling}, return_when=asyncio.FIRST_COMPLETED)
            telling.cancel()  # changes nothing if it is done
            self.generator.stop.set()
            await asyncio.wait_for(running, DEADLINE)
            return await telling

        return asyncio.run(scene())


async def stuck(rig: Rig) -> None:
    """A story in which the engine gives no answer."""
    rig.engine.hold.clear()
    await asyncio.Event().wait()


def playing(**sections: Any) -> Callable[[Callable[[Rig], Any]], Callable[[Broker], None]]:
    """Plays a test, which gets a rig, while its generator runs."""

    def decorate(test: Callable[[Rig], Any]) -> Callable[[Broker], None]:
        def play(fake_broker: Broker) -> None:
            Rig(fake_broker, **sections).play(test)

        return play

    return decorate


def evaluate(rig: Rig, name: str, n: int, version: int = 0) -> None:
    """Dispatch an evaluation of `n` tasks, for `version` or newer."""
    changes = {"kind": "eval", "evaluation": name, "min_version": version}
    dispatch = [(task.model_copy(update=changes | {"task_id": f"{name}-{i}"}), b"") for i, task in enumerate(tasks(n))]
    rig.ledger.commit(Commit(dispatch=dispatch, scalars={"evaluating": name, "evaluating_from": version}))


def over(rig: Rig, name: str) -> None:
    rig.ledger.commit(Commit(closed=[name], scalars={"evaluating": ""}))


def story(header: SampleHeader) -> dict[str, Any]:
    assert header.record is not None
    return json.loads(open_record(header.record))


def one(rig: Rig, **task: Any) -> SampleHeader:
    rig.dispatch(1, **task)
    (header,) = rig.play(lambda rig: rig.headers(1))
    return header


def results(headers: list[SampleHeader]) -> set[tuple[str, float]]:
    return {(header.status, header.reward) for header in headers}
