"""The model of a rank's memory says what is measured, and that the layouts of the documentation fit a card."""

from __future__ import annotations

import gc
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from transformers import AutoConfig, Qwen3Config

from benchmarks.memory_model import Micro, Zero, inputs, make_policy, peak_activations, rank_memory, train_once
from benchmarks.memory_table import CARD_GB, LAYOUTS, RESERVED_GB, RankLayout
from common.config import LearnerConfig
from learner.kernels import choose_attention
from tests.support.forked import Forked
from tests.support.learner import learner_config, make_batch, make_payload, save_tiny_model
from tests.support.memory import peak_bytes
from tests.support.ranks import on_ranks

if TYPE_CHECKING:
    from learner.world import World

pytestmark = [pytest.mark.integration, pytest.mark.slow]

RANKS, BUCKET, SAMPLES, LENGTH = 2, 1_000_000, 16, 128
SMALL = Qwen3Config(
    hidden_size=256,
    intermediate_size=768,
    num_hidden_layers=5,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    vocab_size=4096,
    max_position_embeddings=4096,
)


@pytest.mark.parametrize("checkpointing", [True, False])
def test_activations_of_fake_tensors_are_those_of_real_ones(checkpointing: bool, tmp_path: Path) -> None:
    # In a process of its own: what others have freed in this one would be used again, and not be seen.
    measured = Forked(real_peak, checkpointing, tmp_path / "peak", environment=os.environ, log=tmp_path / "log")
    assert measured.wait(timeout=300) == 0, (tmp_path / "log").read_text()
    real = int((tmp_path / "peak").read_text())
    assert peak_activations(SMALL, activations_of(checkpointing), torch.float32) == pytest.approx(real, rel=0.1)


def activations_of(checkpointing: bool) -> Micro:
    return Micro((1024, 600, 400), prompt=64, chunk=128, checkpointing=checkpointing)


def real_peak(checkpointing: bool, file: Path) -> None:
    """Leaves the bytes that a forward and a backward pass take at most, as the kernel has counted them."""
    micro = activations_of(checkpointing)
    peak_bytes(lambda: None)  # what is freed from now on is given back
    policy, arguments = make_policy(SMALL, micro, torch.float32), inputs(micro)
    train_once(policy, arguments)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = kilobytes("VmRSS")
    train_once(policy, arguments)
    file.write_text(str((kilobytes("VmHWM") - before) * 1024))


def kilobytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def train(world: World, small: str, model: str, folder: str, stage: int) -> None:
    """One rank: load a model and train two batches; leaves the peak in bytes."""
    from learner.trainer import Trainer

    buckets = {"reduce_bucket_size": BUCKET}
    if stage == 3:
        buckets |= {"stage3_max_live_parameters": BUCKET, "stage3_max_reuse_distance": BUCKET}
        buckets |= {"stage3_prefetch_bucket_size": BUCKET // 10}

    def steps(path: str) -> None:
        config = learner_config(
            path,
            folder,
            zero_stage=stage,
            dtype="bfloat16",
            token_budget=SAMPLES * LENGTH // 4,
            logprob_chunk=128,
            deepspeed={"zero_optimization": buckets, "communication_data_type": "fp32"},
        )
        rng = np.random.default_rng(0)
        payloads = [make_payload(rng, LENGTH) for _ in range(SAMPLES)]
        trainer = Trainer(config, world)
        for version in range(2):
            trainer.train(
                make_batch(config, payloads, [1.0] * SAMPLES, version=version, rank=world.rank, ranks=world.size)
            )

    peak_bytes(lambda: steps(small))
    gc.collect()
    _, peak = peak_bytes(lambda: steps(model))
    if world.is_main:
        Path(folder, "peak").write_text(json.dumps(peak))


@pytest.mark.parametrize("stage", [2, 3])
def test_a_rank_that_trains_takes_what_the_model_says(tmp_path: Path, stage: int) -> None:
    small = save_tiny_model(tmp_path / "small")
    model = save_tiny_model(tmp_path / "model", hidden=256, layers=16)
    on_ranks(RANKS, train, small, model, str(tmp_path), stage, folder=tmp_path)
    zero = Zero(stage, RANKS, reduce_bucket=BUCKET, prefetch=BUCKET // 10, max_live=BUCKET)
    micro = Micro((LENGTH,) * (SAMPLES // 4), prompt=20, chunk=128, checkpointing=False)
    expected = rank_memory(AutoConfig.from_pretrained(model), zero, micro).peak
    assert json.loads((tmp_path / "peak").read_text()) == pytest.approx(expected, rel=0.2)


@pytest.mark.parametrize("layout", LAYOUTS[::2], ids=lambda layout: layout.name)
def test_the_table_is_of_the_attention_that_the_learner_takes_on_a_gpu(
    layout: RankLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
        choice = choose_attention(LearnerConfig(dtype="bfloat16"), layout.config)
    policy = make_policy(SMALL, layout.micro, torch.bfloat16)
    assert policy.model.config._attn_implementation == choice.implementation


def test_on_a_gpu_the_output_layer_is_not_copied_in_float32() -> None:
    micro = Micro((512, 300), prompt=64, chunk=128)
    here, there = (peak_activations(SMALL, replace(micro, on_gpu=on_gpu), torch.bfloat16) for on_gpu in (False, True))
    assert here - there >= 4 * SMALL.vocab_size * SMALL.hidden_size


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout.fits], ids=lambda layout: layout.name)
def test_a_layout_that_the_documentation_recommends_fits_a_card(layout: RankLayout) -> None:
    memory = rank_memory(layout.config, layout.zero, layout.micro)
    assert memory.weights + memory.optimizer > 10e9, "the shapes are those of a large model"
    assert memory.peak / 1e9 + RESERVED_GB <= CARD_GB
