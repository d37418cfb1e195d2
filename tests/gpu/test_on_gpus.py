"""What has to be seen on a GPU; the same code runs on the CPU in tests/e2e/test_gpu_measures.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import RedisServer
from tests.support.gpu_measures import (
    Shape,
    engine_measures,
    learner_measures,
    policy_and_batch,
    run_measures,
    save_model,
)

pytestmark = pytest.mark.gpus(1)

Table = Callable[[dict[str, float]], None]
SHAPE = Shape()
CLOSE = 0.02  # mean |difference| of log-probs in bfloat16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model(folder, SHAPE)
    return folder


def test_the_learner_trains_and_publishes(model: Path, tmp_path: Path, table: Table) -> None:
    measures = learner_measures(model, tmp_path, SHAPE)
    table(measures)
    assert measures["learner tokens/s"] > 0


def test_a_forward_and_backward_pass_never_waits_for_the_gpu(model: Path, tmp_path: Path) -> None:
    policy, arguments = policy_and_batch(model, tmp_path, SHAPE)
    assert policy.attention.name == "varlen"

    def train() -> None:
        logprobs, entropies = policy(*arguments, entropy=True)
        (logprobs.sum() + entropies.sum()).backward()

    train()  # kernels are loaded and tuned the first time
    torch.cuda.set_sync_debug_mode("error")
    try:
        train()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("package", "learner"),
    [
        (None, {"attention": "varlen"}),
        ("flash_attn", {"attention": "flash_attention_2"}),
        ("liger_kernel", {"attention": "sdpa", "kernels": "liger"}),
    ],
    ids=["varlen", "flash-attn", "Liger"],
)
def test_logprobs_do_not_depend_on_what_computes_them(
    model: Path, tmp_path: Path, package: str | None, learner: dict[str, Any]
) -> None:
    if package:
        pytest.importorskip(package)
    logprobs = []
    # Plain torch first: Liger stays in transformers' modules.
    for settings in ({"attention": "sdpa"}, learner):
        policy, arguments = policy_and_batch(model, tmp_path, SHAPE, **settings)
        with torch.no_grad():
            logprobs.append(policy(*arguments)[0])
    assert (logprobs[0] - logprobs[1]).abs().mean() < CLOSE


def test_the_engines_logprobs_are_the_learners_before_and_after_an_update(
    model: Path, tmp_path: Path, table: Table
) -> None:
    measures = engine_measures(model, tmp_path, SHAPE)
    table(measures)
    assert measures["log-prob gap"] < CLOSE
    assert measures["after an update"] < CLOSE
    assert measures["with old weights"] > CLOSE, "the update changed nothing"


def test_a_whole_run_on_one_gpu_comes_to_its_end(
    model: Path, tmp_path: Path, own_redis: RedisServer, table: Table
) -> None:
    table(run_measures(model, tmp_path, own_redis.url, SHAPE))


@pytest.mark.gpus(2)
@pytest.mark.parametrize("backend", ["zmq", "nccl"])
def test_a_whole_run_on_two_gpus_comes_to_its_end(
    model: Path, tmp_path: Path, own_redis: RedisServer, table: Table, backend: str
) -> None:
    cards = {"learner": "0", "generator": "1"}
    measures = run_measures(model, tmp_path, own_redis.url, SHAPE, cards, backend)
    table({f"{backend}, two GPUs: {name}": figure for name, figure in measures.items()})
