"""An episode of a deterministic run has one version of the weights from its start to its end, and seeds of its own."""

from __future__ import annotations

import asyncio
from typing import Any

from common.messages import Task
from common.streams.broker import Broker
from generator.engine.engine import Completion
from tests.support.episode import END, ScriptedEngine, call, runner
from tests.support.fault import until
from tests.support.generator import PretendEngine, Rig

SERIAL: dict[str, Any] = {"run": {"deterministic": True}, "generator": {"max_attempts": 2, "retry_pause": 0}}


def test_weights_of_a_learner_that_came_back_wait_for_the_end_of_the_episode(fake_broker: Broker) -> None:
    rig = Rig(fake_broker, **SERIAL)

    async def story(rig: Rig) -> list[Any]:
        rig.engine.hold.clear()
        rig.client.queue.put_nowait(3)
        rig.dispatch(2, min_version=3)
        await until(lambda: rig.engine.calls == 1)
        rig.client.queue.put_nowait(1)
        await until(rig.client.queue.empty)
        for _ in range(100):
            await asyncio.sleep(0)
        assert rig.engine.version == 3
        rig.engine.hold.set()
        headers = await rig.headers(1)
        await until(lambda: rig.engine.version == 1)
        rig.client.queue.put_nowait(3)
        return headers + await rig.headers(1)

    headers = rig.play(story)
    assert [(header.oldest_version, header.newest_version) for header in headers] == [(3, 3), (3, 3)]


def test_the_seed_of_a_task_is_that_of_its_sampling(fake_broker: Broker) -> None:
    class Engine(PretendEngine):
        async def generate(self, prompt_ids: Any, *, max_tokens: int, **sampling: Any) -> Completion:
            seeds.append(sampling["seed"])
            return await super().generate(prompt_ids, max_tokens=max_tokens, **sampling)

    seeds: list[int | None] = []
    rig = Rig(fake_broker, engine=Engine(), **SERIAL)
    rig.dispatch(1, seed=11)
    rig.dispatch(1)
    rig.play(lambda rig: rig.headers(2))
    assert seeds == [11, None]


def test_each_turn_has_the_next_seed() -> None:
    engine = ScriptedEngine(call("calculator", '{"expression": "1+1"}') + END, f"2{END}")
    asyncio.run(runner(engine).run(Task(task_id="t", prompt_id="p", prompt="What is 1+1?"), seed=7))
    assert [limits["seed"] for limits in engine.limits] == [7, 8]
