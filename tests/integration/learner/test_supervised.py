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
from learner.supervised import SupervisedLearner
from tests.support.learner import learner_config, make_demonstrations
from tests.support.ranks import on_ranks

ROWS = 18
UNADAPTED = {"embed_tokens", "input_layernorm", "post_attention_layernorm", "norm", "q_norm", "k_norm"}


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
        metrics |= trained(world.in_groups(config.learner.sequence_parallel), config, stop_at)
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
    if stop_at is not None:
        assert learner.run(until=stop_at - 1)
    assert learner.run() == (stop_at is None)
    return metrics


def steps(config: Config) -> dict[int, dict[str, float]]:
    values = json.loads((config.run.folder / "steps.json").read_text())
    return {int(step): of_step for step, of_step in values.items()}


@pytest.fixture(scope="module")
def configs(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Config]:
    """Training as a whole, training that was stopped after the third step and continued, and that of an adapter."""
    folder = tmp_path_factory.mktemp("supervised")
    made = {name: config_of(model, folder / name) for name in ("whole", "parts")}
    made["adapter"] = config_of(model, folder / "adapter", lora={"rank": 4, "alpha": 8}, lr=1e-2)
    jobs = (made["whole"], None), (made["parts"], 3), (made["parts"], None), (made["adapter"], None)
    on_ranks(1, train, *jobs, folder=folder)
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
    whole, parts = (steps(configs[name]) for name in ("whole", "parts"))
    assert list(whole) == list(parts) == [*range(7)]
    assert [one.get("sft/loss") for one in parts.values()] == [one.get("sft/loss") for one in whole.values()]
    # The sixth has the last row of the second epoch alone.
    assert (whole[6]["sft/epoch"], whole[6]["batch/samples"]) == (2.0, 1)
    left, right = (weights(configs[name], 6) for name in ("whole", "parts"))
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_the_export_of_an_adapter_is_the_model_that_was_trained(model: str, configs: dict[str, Config]) -> None:
    metrics, export = steps(configs["adapter"]), configs["adapter"].run.folder / "checkpoints" / "step_6" / "hf"
    before, after = (metrics[step]["sft/heldout_loss"] for step in (0, 6))
    assert after < before - 0.05
    assert weighted_loss(str(export), make_demonstrations(ROWS)) == pytest.approx(after, rel=1e-5)
    base, trained = load_file(Path(model) / "model.safetensors"), weights(configs["adapter"], 6)
    assert {name.split(".")[-2] for name in base if torch.equal(base[name], trained[name])} == UNADAPTED


# Micro-batches of fewer tokens on ranks that divide sequences.
SHARED: dict[str, dict[str, Any]] = {
    "batches": {"zero_stage": 2},
    "sequences": {"zero_stage": 2, "sequence_parallel": 2, "token_budget": 64},
}


@pytest.mark.slow
def test_two_ranks_learn_what_one_learns(model: str, configs: dict[str, Config], tmp_path: Path) -> None:
    shared = {name: config_of(model, tmp_path / name, **learner) for name, learner in SHARED.items()}
    on_ranks(2, train, *((config, None) for config in shared.values()), folder=tmp_path)
    alone = steps(configs["whole"])
    for config in shared.values():
        for name, one in weights(configs["whole"], 6).items():
            torch.testing.assert_close(one, weights(config, 6)[name], rtol=1e-4, atol=1e-5)
        for step, of_step in steps(config).items():
            losses = {name: value for name, value in of_step.items() if name in ("sft/loss", "sft/heldout_loss")}
            assert losses == pytest.approx({name: alone[step][name] for name in losses}, rel=1e-5)
