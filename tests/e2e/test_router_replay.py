"""Router replay: the engine tells which experts tokens went through, and with them the learner computes the same."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.config import Config, parse_config
from common.payload import Payload, decode_payload, encode_payload
from generator.engine.engine import Completion, Engine
from generator.episode import Episode, Row, Transcript
from learner.batch import micro_batch
from learner.routers import Routing
from learner.trainer import Trainer
from learner.world import start
from tests.e2e.test_logprobs_agree import MOVED, Update, move, with_engine
from tests.support.engine import load, random_prompt, start_engine
from tests.support.mixtures import FAMILIES, save_mixture, tiny_mixture

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SAME = 1e-4  # mean |difference| of log-probs in float32
REPLAYED = [family for family in FAMILIES if family != "gpt-oss"]


def replaying(folder: Path, **model: Any) -> Config:
    return parse_config(
        {
            "run": {"output_dir": str(folder)},
            "model": {"path": str(folder / "model"), "dtype": "float32", "max_model_len": 256} | model,
            "data": {"train": "none.jsonl", "max_prompt_tokens": 64},
            "generator": {"max_concurrency": 16},
            "learner": {"dtype": "float32", "router_replay": "rollout"},
        }
    )


async def two_turns(engine: Engine, seed: int) -> Payload:
    """An episode whose second turn follows what a tool said, as the learner gets it."""
    row = Row(np.asarray(random_prompt(seed, 20 + seed), np.int32))
    for _ in range(2):
        turn = await engine.generate(row.tokens(), max_tokens=60, experts_from=row.routed)
        row.extend(turn)
        row.append(np.asarray(random_prompt(seed + 100, 9), np.int32))
    return decode_payload(encode_payload(Episode([row], Transcript([])).payload()))


async def episodes(engine: Engine, count: int = 8) -> list[Payload]:
    return await asyncio.gather(*(two_turns(engine, seed) for seed in range(count)))


@torch.no_grad()
def difference(trainer: Trainer, payloads: list[Payload], replay: bool = True) -> float:
    """Mean |log pi_learner - log pi_generator| over the sampled tokens."""
    packed = micro_batch([(one, 0.0) for one in payloads], experts=trainer.replayed_experts if replay else None)
    assert (packed.known is not None) == replay
    routing = Routing(packed.predict, packed.experts, packed.known)
    assert bool(routing.replayed().all()) == replay
    inputs = packed.input_ids, packed.position_ids, packed.sequences, packed.predict, packed.targets
    logprobs, _ = trainer.policy(*inputs, routing=routing)
    return float((logprobs - packed.rollout_logprobs).abs().mean())


@pytest.mark.parametrize("family", REPLAYED)
def test_replayed_experts_give_the_engines_logprobs(family: str, tmp_path: Path) -> None:
    save_mixture(tmp_path / "model", family)
    config = replaying(tmp_path)
    trainer = Trainer(config, start())

    async def scene(update: Update) -> None:
        assert difference(trainer, await episodes(update.engine)) < SAME
        for version in (1, 2):
            move(trainer)
            assert difference(trainer, await episodes(update.engine)) > MOVED
            await update.checked(version, trainer, trainer.weights())
            assert difference(trainer, await episodes(update.engine)) < SAME

    asyncio.run(with_engine(config, scene))


@pytest.mark.parametrize("family", REPLAYED)
def test_replay_halves_the_gap_that_other_experts_make(family: str, tmp_path: Path) -> None:
    save_mixture(tmp_path / "model", family)
    config = replaying(tmp_path, dtype="bfloat16")
    trainer = Trainer(config, start())

    async def scene(update: Update) -> None:
        payloads = await episodes(update.engine, 32)
        gaps = [difference(trainer, payloads, replay) for replay in (True, False)]
        tokens = sum(len(payload.token_ids) for payload in payloads)
        print(f"{family}: |difference| {gaps[0]:.5f} with replay, {gaps[1]:.5f} without, of {tokens} tokens")
        assert gaps[0] < gaps[1]

    asyncio.run(with_engine(config, scene))
