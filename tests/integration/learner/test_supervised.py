"""Supervised training: the loss is that of transformers, it continues exactly, and two ranks learn what one learns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from common.config import Config
from launcher.sft.settings import supervised, with_steps
from learner.batch.demonstrations import Demonstration, Demonstrations
from learner.ranks.world import World
from learner.supervised.loop import SupervisedLearner
from tests.support.learner import learner_config, make_demonstrations
from tests.support.ranks import on_ranks

pytestmark = pytest.mark.integration
ROWS = 18


def config_of(model: str, output: Path, **learner: Any) -> Config:
    config = learner_config(model, output, checkpoint_every=2, generator={"temperature": 0.7}, **learner)
    sft = config.sft.model_copy(update={"batch_size": 7, "epochs": 2.0})
    return with_steps(supervised(config.model_copy(update={"sft": sft})), ROWS)


def train(world: World, *jobs: tuple[Config, int | None]) -> None:
    """Train each job to its end, or until one after a step is told to stop; `steps.json` gets the metrics of steps."""
    for config, stop_at in jobs:
        config.run.folder.mkdir(parents=True, exist_ok=True)
        path = config.run.folder / "steps.json"
        metrics = json.loads(path.read_text()) if path.exists() else {}
        metrics |= trained(world, config, stop_at)
        if world.is_main:
            path.write_text(json.dumps(metrics))


def trained(world: World, config: Config, stop_at: int | None) -> dict[int, dict[str, float]]:
    metrics: dict[int, dict[str, float]] = {}

    def report(version: int, of_step: dict[str, float]) -> None:
        metrics[version] = of_step
        if version == stop_at:
            learner.stop.set()

    data = Demonstrations.of(make_demonstrations(ROWS))
    learner = SupervisedLearner(config, world, data, data, report, mock.Mock())
    assert learner.run() == (stop_at is None)
    return metrics


def steps(config: Config) -> dict[int, dict[str, float]]:
    values = json.loads((config.run.folder / "steps.json").read_text())
    return {int(step): of_step for step, of_step in values.items()}


@pytest.fixture(scope="module")
def configs(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Config]:
    """Training as a whole, and training that was stopped after the third step and continued."""
    folder = tmp_path_factory.mktemp("supervised")
    made = {name: config_of(model, folder / name) for name in ("whole", "parts")}
    on_ranks(1, train, (made["whole"], None), (made["parts"], 3), (made["parts"], None), folder=folder)
    return made


def weights(config: Config, version: int) -> dict[str, torch.Tensor]:
    return load_file(config.run.folder / "checkpoints" / f"step_{version}" / "hf" / "model.safetensors")


def weighted_loss(model: str, demonstrations: list[Demonstration]) -> float:
    """The weighted mean of transformers' cross entropy."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    losses = total = 0.0
    for one in demonstrations:
        ids, weight = torch.from_numpy(one.token_ids).long(), torch.from_numpy(one.weights)[1:]
        with torch.no_grad():
            logits = policy(ids[None]).logits[0, :-1]
        losses += float((F.cross_entropy(logits, ids[1:], reduction="none") * weight).sum())
        total += float(weight.sum())
    return losses / total


def test_the_loss_is_that_of_transformers(model: str, configs: dict[str, Config]) -> None:
    metrics = steps(configs["whole"])
    rows = make_demonstrations(ROWS)
    assert metrics[0]["sft/heldout_loss"] == pytest.approx(weighted_loss(model, rows), rel=1e-5)
    order = np.random.default_rng([configs["whole"].run.seed, 0]).permutation(ROWS)[:7]
    assert metrics[1]["sft/loss"] == pytest.approx(weighted_loss(model, [rows[i] for i in order]), rel=1e-5)


def test_training_that_was_stopped_ends_with_the_same_weights_bit_by_bit(configs: dict[str, Config]) -> None:
    whole, parts = (steps(config) for config in configs.values())
    assert list(whole) == list(parts) == [*range(7)]
    assert [one.get("sft/loss") for one in parts.values()] == [one.get("sft/loss") for one in whole.values()]
    # The sixth has the last row of the second epoch alone.
    assert (whole[6]["sft/epoch"], whole[6]["batch/samples"]) == (2.0, 1)
    left, right = (weights(config, 6) for config in configs.values())
    assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.slow
def test_two_ranks_learn_what_one_learns(model: str, configs: dict[str, Config], tmp_path: Path) -> None:
    shared = config_of(model, tmp_path, zero_stage=2)
    on_ranks(2, train, (shared, None), folder=tmp_path)
    one, two = weights(configs["whole"], 6), weights(shared, 6)
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-4, atol=1e-5)
    losses = (
        [of_step["sft/heldout_loss"] for of_step in (steps(config)[0], steps(config)[6])]
        for config in (shared, configs["whole"])
    )
    assert next(losses) == pytest.approx(next(losses), rel=1e-5)
