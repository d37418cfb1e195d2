"""Random agents by the unmodified SDKs, and a tap in the engine: what is trained on is what was sampled, once.

A failure names the seed of its agent.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from pathlib import Path

import httpx2
import numpy as np
import pytest
import structlog
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from common.config import Config, parse_config
from generator.agents.endpoint import Endpoint
from generator.engine.engine import Engine
from generator.episode.episode import TokenRow
from tests.support.broken_connections import BreakingTransport
from tests.support.engine import load
from tests.support.engine_tap import EngineTap, Marker, TappedRequest
from tests.support.random_agents import AgentRun, random_agent
from tests.support.whole_run import save_model

pytestmark = pytest.mark.e2e

SESSIONS, AT_ONCE = 24, 24
REQUESTS_A_VERSION = 40
MOST_VERSIONS = 24
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "%s"}}\n</tool_call>'
# One token each, so that a model without any training calls tools and thinks.
PIECES = [*(CALL % f"{n}+1" for n in range(8)), "<think>", "</think>", *(f"<think>so {n}</think>" for n in range(8))]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    save_model(tmp_path / "model", frequent=PIECES)
    return parse_config(
        {
            "run": {"output_dir": str(tmp_path)},
            "model": {"path": str(tmp_path / "model"), "dtype": "float32", "max_model_len": 768},
            "data": {"train": "none.jsonl", "max_prompt_tokens": 64},
            "generator": {"max_concurrency": 64},
            "learner": {"dtype": "float32"},
        }
    )


class Scene:
    """An endpoint whose engine is tapped, and gets new weights as requests come."""

    def __init__(self, engine: Engine, endpoint: Endpoint, model: PreTrainedModel) -> None:
        self.engine, self.endpoint, self.model = engine, endpoint, model
        self.tap = EngineTap(engine, self._on_request)
        self.http = httpx2.AsyncClient(transport=BreakingTransport(limits=httpx2.Limits()), timeout=600)
        self._expected: dict[Marker, list[asyncio.Event]] = defaultdict(list)
        self._requests, self._wanted = 0, asyncio.Event()

    async def play(self, seed: int) -> tuple[AgentRun, list[TokenRow]]:
        agent = random_agent(seed)
        session = self.endpoint.open_session(agent.limits)
        run = AgentRun(agent, session, self.endpoint.url, self.http, lambda m, event: self._expected[m].append(event))
        await run.run()
        return run, session.rows()

    async def update(self) -> None:
        """Load the next version whenever enough requests have come."""
        for version in range(1, MOST_VERSIONS):
            await self._wanted.wait()
            self._wanted.clear()
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.add_(0.01 * torch.randn_like(parameter))
            await load(self.engine, version, self.model)

    def _on_request(self, tapped: TappedRequest) -> None:
        for event in self._expected.pop(tapped.markers[-1], ()):
            event.set()
        self._requests += 1
        if self._requests % REQUESTS_A_VERSION == 0:
            self._wanted.set()


def test_every_sampled_token_is_trained_on_as_it_was_sampled(config: Config) -> None:
    played, tapped = asyncio.run(play(config))
    seen: Counter[str] = Counter()
    wrong = []
    for run, rows in played:
        try:
            seen += check_books(run, rows, tapped)
        except AssertionError as error:
            wrong.append(f"the agent of seed {run.agent.seed}: {str(error).splitlines()[0]}")
    print(dict(seen))
    assert not wrong
    assert all(seen[what] for what in ("rows", "continued", "calls", "tool_calls", "thoughts", "untrained", "dropped"))


async def play(config: Config) -> tuple[list[tuple[AgentRun, list[TokenRow]]], dict[Marker, list[TappedRequest]]]:
    torch.set_num_threads(1)
    log = structlog.get_logger()
    engine = await Engine.start(config, log)
    endpoint = await Endpoint.start(config, engine, log)
    scene = Scene(engine, endpoint, AutoModelForCausalLM.from_pretrained(config.model.path))
    updating = asyncio.create_task(scene.update())
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(seed: int) -> tuple[AgentRun, list[TokenRow]]:
        async with slots:
            return await scene.play(seed)

    try:
        async with asyncio.TaskGroup() as group:
            played = [group.create_task(one(seed)) for seed in range(SESSIONS)]
        assert engine.version > 0
        return [each.result() for each in played], scene.tap.requests()
    finally:
        updating.cancel()
        await asyncio.wait({updating})
        await scene.http.aclose()
        await endpoint.close()
        await engine.close()


def check_books(run: AgentRun, rows: list[TokenRow], tapped: dict[Marker, list[TappedRequest]]) -> Counter[str]:
    """Compare what the agent knows, the rows of its session, and what the engine got and gave."""
    agent = run.agent
    requests = {call.markers[-1]: tapped.get(call.markers[-1], []) for call in run.calls}
    trained = match(rows, [one for same in requests.values() for one in same])
    used = {
        on_task: any(trained[c.markers[-1]] for c in run.calls if c.on_task == on_task) for on_task in (True, False)
    }
    assert any(used.values()) or not any(call.replies() for call in run.calls), "nothing is trained on"
    assert agent.limits.train == "all" or not all(used.values()), "what has nothing to do with the task is trained on"
    seen = Counter(rows=len(rows), calls=sum(len(call.heard) for call in run.calls))
    for call in run.calls:
        marker = call.markers[-1]
        count, own = trained[marker], requests[marker]
        if agent.limits.train == "all" or used[call.on_task]:
            assert len(call.replies()) <= count <= len(call.heard) + call.perhaps, (
                f"{marker} is trained on {count} times: {call}"
            )
            seen["dropped"] += len(own) - count
        else:
            assert count == 0
            seen["untrained"] += len(own)
        seen["tool_calls"] += sum(len(reply.calls) for reply in call.heard)
        seen["thoughts"] += sum("</think>" in reply.text for reply in call.heard)
        for one in own:
            assert one.markers == call.markers, f"the prompt of {marker} has other messages than were sent"
            if call.continues is not None:
                before = [r.prompt + r.sampled for r in requests[call.continues]]
                kept = any(one.prompt[: len(ids)] == ids for ids in before)
                heard = [reply for other in run.calls if other.markers[-1] == call.continues for reply in other.heard]
                assert kept, f"{marker} does not continue the ids of {call.continues}, to which came {heard}"
                seen["continued"] += 1
    return seen


def match(rows: list[TokenRow], requests: list[TappedRequest]) -> Counter[Marker]:
    """How often requests of each marker are trained on; each turn of a row is one request, used once."""
    left = list(requests)
    trained: Counter[Marker] = Counter()
    for row in rows:
        ids = row.tokens().tolist()
        for (begin, end), logprobs in zip(row.spans, row.logprobs, strict=True):
            same = [one for one in left if one.prompt == ids[:begin] and one.sampled == ids[begin:end]]
            assert same, f"the engine did not sample tokens {begin} to {end} of a row, or they are trained on twice"
            assert np.float32(same[0].logprobs).tolist() == logprobs.tolist(), "other log-probs were recorded"
            left.remove(same[0])
            trained[same[0].markers[-1]] += 1
    return trained
