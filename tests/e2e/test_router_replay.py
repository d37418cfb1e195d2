"""Router replay: the engine tells which experts tokens went through, and with them the learner computes the same."""

from __future__ import annotations

import asyncio
import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler

from common.config import BrokerConfig
from common.payload import Payload, decode_payload, encode_payload
from common.streams.broker import connect
from generator.engine.engine import Completion, Engine
from generator.episode.episode import Episode, TokenRow, Transcript
from learner.policy.routers import Routing
from learner.ranks.world import start
from learner.trainer import Trainer
from tests.conftest import RedisServer
from tests.support.agreement import MOVED, Update, both_sides, move, with_engine
from tests.support.engine import load, random_prompt, start_engine
from tests.support.families import save_tiny, tiny
from tests.support.waiting import PATIENCE
from tests.support.whole_run import json_lines, kill, settled_counters, started, wait_for_version, write_run

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SAME = 1e-4  # mean |difference| of log-probs in float32
FEW = 5e-3  # share of choices that rounding changes: on some processors one of 758


async def two_turns(engine: Engine, seed: int) -> Payload:
    """An episode whose second turn follows what a tool said, as the learner gets it."""
    row = TokenRow(np.asarray(random_prompt(seed, 20 + seed), np.int32))
    for _ in range(2):
        turn = await engine.generate(row.tokens(), max_tokens=60, experts_from=row.routed)
        row.extend(turn)
        row.append(np.asarray(random_prompt(seed + 100, 9), np.int32))
    return decode_payload(encode_payload(Episode([row], Transcript([])).payload()))


async def episodes(engine: Engine, count: int = 8) -> list[Payload]:
    return await asyncio.gather(*(two_turns(engine, seed) for seed in range(count)))


@torch.no_grad()
def difference(trainer: Trainer, payloads: list[Payload]) -> float:
    """Mean |log pi_learner - log pi_generator| over the sampled tokens."""
    packed = trainer.packer().micro_batch([(one, 0.0) for one in payloads])
    routing = Routing(packed.predict, packed.experts, packed.known)
    assert routing.replayed().all()
    inputs = packed.input_ids, packed.position_ids, packed.sequences, packed.predict, packed.targets
    logprobs, _ = trainer.policy(*inputs, routing=routing)
    return float((logprobs - packed.rollout_logprobs).abs().mean())


def others(model: Any, ids: list[int], experts: np.ndarray) -> float:
    """Share of the layers of a sequence's first tokens whose experts are not those of transformers' routers."""
    chosen: list[torch.Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda *call: chosen.append(call[2][2])) for layer in model.model.layers
    ]
    with torch.no_grad():
        model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    expected = torch.stack(chosen, 1).sort(-1).values.numpy()
    return float((np.sort(experts, -1) != expected[: len(experts)]).any(-1).mean())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    save_tiny(folder, "Qwen3-MoE")
    return folder


BLOCKS = 7  # of 128 tokens, of which one is vLLM's own
# However vLLM computes: in parts of 48 tokens, or with so small a cache that requests are taken out and read again.
ENGINES: dict[str, dict[str, Any]] = {
    "parts": {"max_num_batched_tokens": 48},
    "preempted": {"num_gpu_blocks_override": BLOCKS, "gpu_memory_utilization": 0.1},
}


@pytest.mark.parametrize("kind", ENGINES)
def test_the_engine_tells_the_experts_of_every_token(kind: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference, preempted = tiny("Qwen3-MoE", 0), multiprocessing.Value("i", 0)
    preempt: Any = Scheduler._preempt_request

    def counting(*arguments: Any, **named: Any) -> Any:
        with preempted.get_lock():
            preempted.value += 1
        return preempt(*arguments, **named)

    monkeypatch.setattr(Scheduler, "_preempt_request", counting)  # vLLM's process is a fork of this one

    async def scene() -> None:
        engine = await start_engine(model, 4, enable_return_routed_experts=True, **ENGINES[kind])
        try:
            prompts = [random_prompt(seed, 100 + seed) for seed in range(4)]
            for prompt, turn in zip(
                prompts, await asyncio.gather(*(sample(engine, one) for one in prompts)), strict=True
            ):
                ids = prompt + turn.token_ids.tolist()
                assert len(turn.experts) == len(ids) - 1
                assert others(reference, ids, turn.experts) < FEW
                # The next turn reads what is cached, and tells the rest.
                again = [*ids, *random_prompt(9, 5)]
                rest = await sample(engine, again, 3, experts_from=len(turn.experts))
                whole = np.concatenate([turn.experts, rest.experts])
                assert len(whole) == len(again) + 2
                assert others(reference, again + rest.token_ids.tolist(), whole) < FEW
                # Another request with this beginning tells what was computed for the first.
                cached = await sample(engine, again, 3)
                assert cached.cached_tokens >= 128
                assert others(reference, again + cached.token_ids.tolist(), cached.experts) < FEW
        finally:
            await engine.close()

    asyncio.run(scene())
    assert (preempted.value > 0) == (kind == "preempted")


def test_a_request_keeps_the_experts_that_older_weights_chose(model: Path) -> None:
    before, after = tiny("Qwen3-MoE", 0), tiny("Qwen3-MoE", 1)

    async def scene() -> None:
        engine = await start_engine(model, 4, enable_return_routed_experts=True)

        async def until_sampled() -> None:
            requests = engine.llm.output_processor.request_states
            while not any(len(state.routed_experts_chunks) > 20 for state in requests.values()):
                await asyncio.sleep(0)

        try:
            prompt, cut = random_prompt(1, 30), asyncio.Event()
            running = asyncio.create_task(sample(engine, prompt))
            await until_sampled()
            await load(engine, 1, after)
            turn = await running
            ids, (old, *_) = prompt + turn.token_ids.tolist(), [span[2] for span in turn.versions]
            assert [version for version, _, _ in turn.versions] == [0, 1]
            assert len(turn.experts) == len(ids) - 1
            assert others(before, ids, turn.experts[: len(prompt) + old - 1]) < FEW
            assert others(before, ids, turn.experts) > FEW
            # A request that is cut has the experts of what it has sampled.
            running = asyncio.create_task(sample(engine, prompt, cut=cut))
            await until_sampled()
            cut.set()
            turn = await running
            assert turn.finish_reason == "time"
            assert len(turn.experts) == len(prompt) + len(turn.token_ids) - 1
            assert others(after, prompt + turn.token_ids.tolist(), turn.experts) < FEW
        finally:
            await engine.close()

    asyncio.run(scene())


async def sample(engine: Engine, prompt: list[int], tokens: int = 280, experts_from: int = 0, **how: Any) -> Completion:
    """So many tokens, whichever they are."""
    params = SamplingParams(
        max_tokens=tokens,
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        routed_experts_prompt_start=experts_from,
    )
    async for _, part in engine.stream(prompt, params, **how):
        completion = part
    return completion


@pytest.mark.parametrize("family", ["Qwen2-MoE", "gpt-oss"])
def test_replayed_experts_give_the_engines_logprobs(family: str, tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", family)
    config = both_sides(tmp_path, router_replay="rollout")
    trainer = Trainer(config, start())

    async def scene(update: Update) -> None:
        assert difference(trainer, await episodes(update.engine)) < SAME
        move(trainer)
        assert difference(trainer, await episodes(update.engine)) > MOVED
        await update.checked(1, trainer, trainer.weights())
        assert difference(trainer, await episodes(update.engine)) < SAME

    asyncio.run(with_engine(config, scene))


def test_a_run_replays_every_token_of_two_turns_and_goes_on_after_its_learner_is_killed(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    sections = {
        "run": {"steps": 4},
        "model": {"dtype": "bfloat16"},
        "sampler": {"batch_size": 16},
        "episode": {
            "max_response_tokens": 48,
            "max_assistant_turns": 2,
            "user": "corrector",
            "user_options": {"turns": 1},
        },
        "algorithm": {"proximal": "recompute", "kl_coef": 0.1},
        "learner": {"router_replay": "rollout", "router_balance": 0.01, "mini_batches": 2}
        | {"zero_stage": 3, "checkpoint_every": 1},
    }
    path = write_run(tmp_path, "replay", sections)
    save_tiny(tmp_path / "model", "Qwen3-MoE")
    broker = connect(BrokerConfig(url=redis_server.url, dead_after=3.0), "replay")
    with started(tmp_path / "log", "run", path, "--plain", "--redis", redis_server.url) as process:
        wait_for_version(broker, 2, process)
        kill(broker, "learner")
        assert process.wait(5 * PATIENCE) == 0, (tmp_path / "log").read_text()
    assert settled_counters(broker)["batched"] == 4 * 16
    rows = json_lines(tmp_path / "runs" / "replay" / "metrics.jsonl")
    steps = {row["version"]: row["values"] for row in rows if "router/entropy" in row["values"]}
    assert sorted(steps) == [1, 2, 3, 4]
    for step in steps.values():
        assert step["router/replayed"] == 1
        assert step["batch/left_out"] == 0
        assert 0 < step["router/differs"] < 0.2
        assert 0 <= step["router/load_min"] <= step["router/load_min_mean"] < 1 < step["router/load_max_mean"]
        assert 0 < step["router/entropy"] < np.log(8)
    generator = (tmp_path / "runs" / "replay" / "logs" / "generator-1.log").read_text()
    assert "log-probs agree with the learner's" in generator
