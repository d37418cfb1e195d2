"""The generator's log-probs are the learner's, for the initial weights and for weights sent by the learner."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import structlog
import torch

from common.config import Config, LoraConfig, parse_config
from common.errors import UserError
from common.payload import Payload
from generator.engine.engine import Engine
from generator.weights.loading import load_weights
from generator.weights.logprob_check import LogprobCheck
from generator.weights.weight_client import WeightClient
from launcher.quickstart.tiny_model import build_model, build_tokenizer, save
from learner.batch import micro_batch
from learner.logprob_check import scored_prompt
from learner.trainer import Trainer
from learner.weight_server import WeightServer
from learner.world import start

pytestmark = pytest.mark.e2e
PROMPTS = ["What is 12*7+5?", "What is 3+4?", "hello", "What is 999-1?"]


def with_lora(config: Config, serve: str | None) -> Config:
    lora = None if serve is None else LoraConfig.model_validate({"rank": 4, "alpha": 8, "serve": serve})
    return config.model_copy(update={"learner": config.learner.model_copy(update={"lora": lora})})


def move(trainer: Trainer) -> None:
    """Change what is trained as much as can be seen."""
    with torch.no_grad():
        for _, parameter in trainer.policy.named_weights():
            parameter.add_((0.2 if trainer.policy.has_adapter else 0.02) * torch.randn_like(parameter))


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
    packed = micro_batch([(payload, 0.0) for payload in payloads])
    with torch.no_grad():
        logprobs, _ = trainer.policy(
            packed.input_ids, packed.position_ids, packed.sequences, packed.predict, packed.targets
        )
    return float((logprobs - packed.rollout_logprobs).abs().mean())


@pytest.mark.parametrize("serve", [None, "merged"])
def test_generator_and_learner_agree_before_and_after_an_update(config: Config, serve: str | None) -> None:
    config = with_lora(config, serve)
    trainer = Trainer(config, start())
    server = WeightServer(config.learner.weights)

    async def scene() -> tuple[float, float, float]:
        engine = await Engine.start(config, structlog.get_logger())
        client = WeightClient(server.endpoint, config.learner.weights)
        try:
            before = difference(trainer, await sample(engine))
            move(trainer)
            stale = difference(trainer, await sample(engine))
            server.publish(1, trainer.weights(), "float32")
            with await client.next() as weights:
                await load_weights(engine, weights, config.learner.lora)
            payloads = await sample(engine)
            assert {int(v) for payload in payloads for v in payload.versions()} == {1}
            return before, stale, difference(trainer, payloads)
        finally:
            client.close()
            await engine.close()

    try:
        torch.manual_seed(0)
        before, stale, after = asyncio.run(scene())
    finally:
        server.close()
    assert before < 1e-3
    assert stale > 0.01  # the change is large enough to be seen
    assert after < 1e-3


def test_a_request_under_way_keeps_the_adapter_that_it_began_with(config: Config) -> None:
    config = with_lora(config, "adapter")
    trainer = Trainer(config, start())
    server = WeightServer(config.learner.weights)

    def set_weights(adapter: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in trainer.policy.named_weights():
                parameter.copy_(adapter[name])

    async def scene() -> None:
        engine = await Engine.start(config, structlog.get_logger())
        client = WeightClient(server.endpoint, config.learner.weights)

        async def update(version: int) -> dict[str, torch.Tensor]:
            move(trainer)
            server.publish(version, trainer.weights(), "float32")
            with await client.next() as weights:
                await load_weights(engine, weights, config.learner.lora)
            return {name: tensor.clone() for name, tensor in trainer.weights()}

        try:
            adapters = {1: await update(1)}
            under_way = asyncio.create_task(sample(engine))
            for _ in range(3):  # until its requests have been made
                await asyncio.sleep(0)
            adapters[2] = await update(2)
            assert not under_way.done()
            for version, payloads in ((1, await under_way), (2, await sample(engine))):
                assert {int(v) for payload in payloads for v in payload.versions()} == {version}
                set_weights(adapters[version])
                assert difference(trainer, payloads) < 1e-3
                set_weights(adapters[3 - version])
                assert difference(trainer, payloads) > 0.01
        finally:
            client.close()
            await engine.close()

    try:
        torch.manual_seed(0)
        asyncio.run(scene())
    finally:
        server.close()


def with_old_layer(weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights, but for one layer's, which are not the ones the learner computes with."""
    for name, tensor in weights:
        yield name, tensor + 0.2 if "layers.0.mlp" in name else tensor


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_an_update_is_checked_against_the_learners_log_probs(config: Config, temperature: float) -> None:
    config = config.model_copy(update={"generator": config.generator.model_copy(update={"temperature": temperature})})
    trainer = Trainer(config, start())
    server = WeightServer(config.learner.weights)

    async def scene() -> None:
        engine = await Engine.start(config, structlog.get_logger())
        client = WeightClient(server.endpoint, config.learner.weights)

        async def update(version: int, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
            server.publish(version, weights, "float32", scored_prompt(trainer))
            with await client.next() as arrived:
                await engine.load(version, arrived)
            await LogprobCheck(engine, config, structlog.get_logger()).after_update(arrived.manifest)

        try:
            await update(0, trainer.weights())
            with torch.no_grad():
                for parameter in trainer.policy.parameters():
                    parameter.add_(0.02 * torch.randn_like(parameter))
            await update(1, trainer.weights())
            with pytest.raises(UserError, match=r"version 2.*not all weights have arrived"):
                await update(2, with_old_layer(trainer.weights()))
            await update(3, trainer.weights())
        finally:
            client.close()
            await engine.close()

    try:
        torch.manual_seed(0)
        asyncio.run(scene())
    finally:
        server.close()
