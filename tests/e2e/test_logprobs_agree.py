"""The generator's log-probs are the learner's, for the initial weights and for weights sent by the learner."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from common.config import Config
from common.errors import UserError
from launcher.quickstart.tiny_model import build_model, build_tokenizer, save
from learner.ranks.world import start
from learner.trainer import Trainer
from tests.support.agreement import MOVED, Update, both_sides, difference, move, sample, with_engine, with_lora

pytestmark = pytest.mark.e2e
SAME = 1e-3  # mean |difference| of log-probs that rounding explains


@pytest.fixture
def config(tmp_path: Path) -> Config:
    tokenizer = build_tokenizer()
    save(build_model(tokenizer, seed=0), tokenizer, tmp_path / "model")
    return both_sides(tmp_path)


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
        await update(1, trainer)
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
            await update(version, trainer)
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
