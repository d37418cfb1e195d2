"""An engine beside a learner whose weights reach it over a real server and client, and how far the two are apart."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch

from common.config import Config, LoraConfig, parse_config
from common.payload import Payload
from generator.engine.engine import Engine
from generator.weight_updater import load_weights
from generator.weights.logprob_check import LogprobCheck
from generator.weights.weight_client import WeightClient
from learner.batch.tensors import Packer
from learner.publish.publisher import scored_prompt
from learner.publish.weight_server import WeightServer
from learner.trainer import Trainer

MOVED = 0.01  # mean |difference| of log-probs that can be seen
PROMPTS = ["What is 12*7+5?", "What is 3+4?", "hello", "What is 999-1?"]
Weights = Iterable[tuple[str, torch.Tensor]]


def both_sides(folder: Path, dtype: str = "float32", **learner: Any) -> Config:
    """A configuration for engine and learner of the model in `folder / "model"`.

    Args:
        dtype: in which the engine computes; the learner computes in float32.
    """
    return parse_config(
        {
            "run": {"output_dir": str(folder)},
            "model": {"path": str(folder / "model"), "dtype": dtype, "max_model_len": 256},
            "data": {"train": "none.jsonl", "max_prompt_tokens": 64},
            "generator": {"max_concurrency": 8},
            "learner": {"dtype": "float32"} | learner,
        }
    )


def with_lora(config: Config, serve: str | None) -> Config:
    lora = None if serve is None else LoraConfig.model_validate({"rank": 4, "alpha": 8, "serve": serve})
    return config.model_copy(update={"learner": config.learner.model_copy(update={"lora": lora})})


def move(trainer: Trainer) -> None:
    """Change what is trained as much as can be seen."""
    with torch.no_grad():
        for _, parameter in trainer.policy.named_weights():
            parameter.add_((0.2 if trainer.policy.has_adapter else 0.02) * torch.randn_like(parameter))


class Update:
    """An engine, and a learner whose weights reach it over a real server and client."""

    def __init__(self, engine: Engine, config: Config) -> None:
        self.engine = engine
        self.server = WeightServer(config.learner.weights)
        self.client = WeightClient(self.server.endpoint, config.learner.weights)

    async def __call__(self, version: int, trainer: Trainer) -> None:
        """Publish the learner's weights, or its adapter, and load what arrives."""
        self.server.serve(self.server.copy(version, trainer.weights(), "float32"))
        with await self.client.next() as arrived:
            await load_weights(self.engine, arrived, trainer.config.learner.lora)

    async def checked(self, version: int, trainer: Trainer, weights: Weights) -> None:
        """Publish weights with the learner's log-probs of a prompt; the engine is checked against them."""
        self.server.serve(self.server.copy(version, weights, "float32", scored_prompt(trainer)))
        with await self.client.next() as arrived:
            await self.engine.load(version, arrived)
        await LogprobCheck(self.engine, trainer.config, structlog.get_logger()).after_update(arrived.manifest)


async def with_engine(config: Config, scene: Callable[[Update], Awaitable[None]]) -> None:
    """Play a scene with an engine of its own."""
    torch.manual_seed(0)
    engine = await Engine.start(config, structlog.get_logger())
    update = Update(engine, config)
    try:
        await scene(update)
    finally:
        update.client.close()
        update.server.close()
        await engine.close()


async def sample(engine: Engine) -> list[Payload]:
    """One response of up to 40 tokens to each prompt."""
    payloads = []
    ids = [np.asarray(engine.tokenizer.encode(text), np.int32) for text in PROMPTS]
    turns = await asyncio.gather(*(engine.generate(prompt, max_tokens=40) for prompt in ids))
    for prompt, turn in zip(ids, turns, strict=True):
        span = np.array([[len(prompt), len(prompt) + len(turn.token_ids)]], np.int32)
        versions = np.asarray(turn.versions, np.int32)
        payloads.append(Payload(np.concatenate([prompt, turn.token_ids]), span, turn.logprobs, versions))
    return payloads


def difference(trainer: Trainer, payloads: list[Payload]) -> float:
    """Mean |log pi_learner - log pi_generator| over the sampled tokens."""
    packed = Packer(trainer.policy.vocabulary).micro_batch([(payload, 0.0) for payload in payloads])
    with torch.no_grad():
        logprobs, _ = trainer.policy(
            packed.input_ids, packed.position_ids, packed.sequences, packed.predict, packed.targets
        )
    return float((logprobs - packed.rollout_logprobs).abs().mean())
