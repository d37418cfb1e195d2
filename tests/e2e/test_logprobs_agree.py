"""The generator's log-probs are the learner's, for the initial weights and for weights sent by the learner."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
import structlog
import torch

from common.config import Config, LoraConfig, parse_config
from common.errors import UserError
from common.payload import Payload
from generator.engine.engine import Engine
from generator.weight_updater import load_weights
from generator.weights.logprob_check import LogprobCheck
from generator.weights.weight_client import WeightClient
from launcher.quickstart.tiny_model import build_model, build_tokenizer, save
from learner.batch.tensors import Packer
from learner.publish.publisher import scored_prompt
from learner.publish.weight_server import WeightServer
from learner.ranks.world import start
from learner.trainer import Trainer

pytestmark = pytest.mark.e2e
SAME, MOVED = 1e-3, 0.01  # mean |difference| of log-probs: rounding; what can be seen
Weights = Iterable[tuple[str, torch.Tensor]]
PROMPTS = ["What is 12*7+5?", "What is 3+4?", "hello", "What is 999-1?"]


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
        self.engine, self.config = engine, config
        self.server = WeightServer(config.learner.weights)
        self.client = WeightClient(self.server.endpoint, config.learner.weights)

    async def __call__(self, version: int, weights: Weights) -> None:
        """Publish weights and load what arrives."""
        self.server.serve(self.server.copy(version, weights, "float32"))
        with await self.client.next() as arrived:
            await load_weights(self.engine, arrived, self.config.learner.lora)

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


@pytest.fixture
def config(tmp_path: Path) -> Config:
    tokenizer = build_tokenizer()
    save(build_model(tokenizer, seed=0), tokenizer, tmp_path / "model")
    return parse_config(
        {
            "run": {"output_dir": str(tmp_path)},
            "model": {"path": str(tmp_path / "model"), "dtype": "float32", "max_model_len": 128},
            "data": {"train": "none.jsonl", "max_prompt_tokens": 64},
            "generator": {"max_concurrency": 8},
            "learner": {"dtype": "float32"},
        }
    )


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


def with_old_layer(weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights, but for one layer's, which are not the ones the learner computes with."""
    for name, tensor in weights:
        yield name, tensor + 0.2 if "layers.0.mlp" in name else tensor


@pytest.mark.parametrize("serve", [None, "merged"])
def test_generator_and_learner_agree_before_and_after_an_update(config: Config, serve: str | None) -> None:
    config = with_lora(config, serve)
    trainer = Trainer(config, start())

    async def scene(update: Update) -> None:
        assert difference(trainer, await sample(update.engine)) < SAME
        move(trainer)
        assert difference(trainer, await sample(update.engine)) > MOVED
        await update(1, trainer.weights())
        payloads = await sample(update.engine)
        assert {int(v) for payload in payloads for v in payload.versions()} == {1}
        assert difference(trainer, payloads) < SAME
        if serve is not None:
            return
        # The learner scores a prompt whatever the temperature of its policy.
        for version, temperature in ((2, 1.0), (5, 0.5)):
            generator = config.generator.model_copy(update={"temperature": temperature})
            learner = Trainer(config.model_copy(update={"generator": generator}), trainer.world)
            await update.checked(version, learner, learner.weights())
            move(learner)
            await update.checked(version + 1, learner, learner.weights())
            with pytest.raises(UserError, match=rf"version {version + 2}.*not all weights have arrived"):
                await update.checked(version + 2, learner, with_old_layer(learner.weights()))

    asyncio.run(with_engine(config, scene))


@pytest.mark.slow
def test_a_request_under_way_keeps_its_adapter(config: Config) -> None:
    config = with_lora(config, "adapter")
    trainer = Trainer(config, start())
    adapters: dict[int, dict[str, torch.Tensor]] = {}

    def set_weights(version: int) -> None:
        with torch.no_grad():
            for name, parameter in trainer.policy.named_weights():
                parameter.copy_(adapters[version][name])

    async def scene(update: Update) -> None:
        async def next_version(version: int) -> None:
            move(trainer)
            await update(version, trainer.weights())
            adapters[version] = {name: tensor.clone() for name, tensor in trainer.weights()}

        await next_version(1)
        under_way = asyncio.create_task(sample(update.engine))
        for _ in range(3):  # until its requests have been made
            await asyncio.sleep(0)
        await next_version(2)
        assert not under_way.done()
        for version, payloads in ((1, await under_way), (2, await sample(update.engine))):
            assert {int(v) for payload in payloads for v in payload.versions()} == {version}
            set_weights(version)
            assert difference(trainer, payloads) < SAME
            set_weights(3 - version)
            assert difference(trainer, payloads) > MOVED

    asyncio.run(with_engine(config, scene))
