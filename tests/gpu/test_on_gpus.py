"""What has to be seen on a GPU. Tests with a `shape` run on a CPU, too: `--on-cpu`, tests/e2e/test_gpu_measures.py."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from common.nvml import GpuReader
from launcher.layout.gpus import read_gpus
from learner.policy.logprobs import LogprobHead
from learner.publish.host_copy import HostMemory
from learner.publish.weight_copy import copy_weights
from tests.conftest import RedisServer
from tests.support.gpu_measures import (
    DEVICE,
    UPDATES,
    Figures,
    Shape,
    family_measures,
    learner_measures,
    policy_and_batch,
    rate_measures,
    run_measures,
    save_model,
    update_measures,
)

pytestmark = pytest.mark.gpus(1)

# Mean |difference| of log-probs in bfloat16; a router may choose other experts where two are almost alike.
CLOSE, CLOSE_OF_FAMILIES = 0.02, 0.1
SMALL = Shape(hidden=1024, vocabulary=0, tokens=256, steps=4)  # for what is not measured by the head


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory, shape: Shape) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model(folder, shape)
    return folder


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> tuple[Path, Shape]:
    """A smaller model, whose ids are those of the tokenizer."""
    folder, shape = tmp_path_factory.mktemp("small"), SMALL
    if request.config.getoption("--on-cpu"):
        shape = replace(request.getfixturevalue("shape"), vocabulary=0)
    save_model(folder, shape)
    return folder, shape


def test_the_layout_sees_the_gpus_that_torch_counts() -> None:
    seen = read_gpus(os.environ)
    there = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    assert [gpu.product for gpu in seen] == [properties.name for properties in there]
    for gpu, properties in zip(seen, there, strict=True):
        assert gpu.total == pytest.approx(properties.total_memory, rel=0.05)


def test_nvml_measures_the_gpu() -> None:
    reader = GpuReader(1)
    reader.read()
    figures = reader.figures()
    assert {"gpu/utilisation", "gpu/memory_gb", "gpu/watts"} <= figures.keys()
    assert figures["gpu/watts"] > 10


def test_the_learner_trains_and_publishes(model: Path, tmp_path: Path, shape: Shape, figures: Figures) -> None:
    # In a process of its own, as DeepSpeed keeps what it holds of the card as long as a process lives.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        process.submit(learner_measures, model, tmp_path, shape, figures).result()
    measured = figures.read()
    assert measured["learner tokens/s"] > 0
    assert measured["publish seconds"] > 0
    assert 0 < measured.get("learner MFU", 0.5) < 1


def test_the_engines_rate_is_beside_that_of_bare_vllm(
    model: Path, tmp_path: Path, shape: Shape, figures: Figures
) -> None:
    rate_measures(model, tmp_path, shape, figures)
    assert min(figures.read()[f"{side} tokens/s"] for side in ("engine", "bare AsyncLLM")) > 0


def test_the_engines_logprobs_are_the_learners_after_updates_too(
    model: Path, tmp_path: Path, shape: Shape, figures: Figures
) -> None:
    update_measures(model, tmp_path, shape, figures)
    agree(figures, "", CLOSE)


@pytest.mark.parametrize("family", ["Qwen3-MoE", "Qwen3.5"])
def test_a_mixture_and_a_hybrid_take_updates(family: str, tmp_path: Path, shape: Shape, figures: Figures) -> None:
    family_measures(family, tmp_path, replace(shape, eager=True), figures)
    agree(figures, f"{family}: ", CLOSE_OF_FAMILIES)


def agree(figures: Figures, prefix: str, close: float) -> None:
    measured = figures.read()
    after = [measured[f"{prefix}gap after update {update + 1}"] for update in range(UPDATES)]
    assert max(measured[f"{prefix}log-prob gap"], *after) < close
    assert measured[f"{prefix}gap with old weights"] > 1.5 * max(after), "the update changed nothing"


@pytest.mark.parametrize("cards", ["0", pytest.param("0,1", marks=pytest.mark.gpus(2))])
def test_a_whole_run_comes_to_its_end(
    small: tuple[Path, Shape], tmp_path: Path, own_redis: RedisServer, shape: Shape, figures: Figures, cards: str
) -> None:
    folder, own = small
    run_measures(folder, tmp_path, own_redis.url, replace(own, eager=shape.eager), cards, figures)


def test_a_copy_beside_training_has_the_weights_before_it(shape: Shape) -> None:
    device, size = torch.device(DEVICE), 32 * shape.hidden * shape.hidden // 4
    weights = {f"layer {number}": torch.full((size,), float(number), device=device) for number in range(4)}
    first = copy_weights(0, weights.items(), torch.bfloat16, 4 << 20, device=device).snapshot()
    # The first memory had to grow; this one is pinned, so that the copy goes on while this thread does.
    memory = HostMemory(first.manifest.total_bytes)
    for version in range(1, 4):
        copy = copy_weights(version, weights.items(), torch.bfloat16, 4 << 20, memory=memory, device=device)
        copy.on_the_way.before_update()
        for tensor in weights.values():
            tensor.add_(100)
        snapshot = copy.snapshot()
        for number, start in enumerate(snapshot.manifest.offsets):
            values = memory.data[start:].view(torch.bfloat16)[:size]
            expected = torch.tensor(number + 100.0 * (version - 1)).bfloat16()
            assert bool((values == expected).all()), f"version {version}, layer {number}"


def test_memory_that_cannot_be_pinned_spoils_nothing() -> None:
    memory = HostMemory(1 << 20)
    assert HostMemory(1 << 20, memory.file).data.data_ptr() == memory.data.data_ptr()  # which is pinned already
    assert torch.ones(8, device="cuda").add(1).sum().item() == 16


def test_float32_logits_and_gradients_are_those_of_a_copy(shape: Shape) -> None:
    torch.manual_seed(0)
    head = torch.nn.Linear(512, 1000, bias=False, device=DEVICE, dtype=torch.bfloat16)
    exact = torch.nn.Linear(512, 1000, bias=False, device=DEVICE)
    with torch.no_grad():
        exact.weight.copy_(head.weight)
    hidden = torch.randn(70, 512, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    exact_hidden = hidden.detach().float().requires_grad_()
    targets = torch.randint(0, 1000, (70,), device=DEVICE)
    LogprobHead.adopt(head, 32, 1.0)
    logprobs, _ = head(hidden, targets)
    expected = exact(exact_hidden).log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-4)
    logprobs.sum().backward()
    expected.sum().backward()
    for ours, theirs in ((hidden, exact_hidden), (head.weight, exact.weight)):
        assert torch.nn.functional.cosine_similarity(ours.grad.float().flatten(), theirs.grad.flatten(), 0) > 0.999


def test_a_forward_and_backward_pass_never_waits_for_the_gpu(small: tuple[Path, Shape], tmp_path: Path) -> None:
    policy, arguments = policy_and_batch(small[0], tmp_path, small[1])
    assert policy.choices["attention"].name == "varlen"

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
    small: tuple[Path, Shape], tmp_path: Path, package: str | None, learner: dict[str, Any]
) -> None:
    if package:
        pytest.importorskip(package)
    logprobs = []
    # Plain torch first: Liger stays in transformers' modules.
    for settings in ({"attention": "sdpa", "kernels": "torch"}, learner):
        policy, arguments = policy_and_batch(small[0], tmp_path, small[1], **settings)
        with torch.no_grad():
            logprobs.append(policy(*arguments)[0])
    assert (logprobs[0] - logprobs[1]).abs().mean() < CLOSE


def test_selective_recomputation_has_the_gradient_of_none(small: tuple[Path, Shape], tmp_path: Path) -> None:
    gradients = []
    for how in (False, "selective"):
        policy, arguments = policy_and_batch(small[0], tmp_path, small[1], gradient_checkpointing=how)
        policy(*arguments)[0].sum().backward()
        gradients.append(policy.model.get_input_embeddings().weight.grad.float().flatten())
    assert torch.nn.functional.cosine_similarity(*gradients, 0) > 0.999
