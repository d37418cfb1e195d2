"""The real vLLM engine: its log-probs are the model's, and after an update nothing of the old weights is left."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import shutil
import signal
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from common.errors import UserError
from common.log import get_logger
from generator.engine.engine import Completion, Engine, EngineDied
from tests.support.engine import (
    MAX_MODEL_LEN,
    engine_config,
    load,
    random_prompt,
    reference_logprobs,
    save_tiny_model,
    start_engine,
    tiny_model,
)

pytestmark = pytest.mark.e2e

BLOCK = 128  # tokens of one block of the prefix cache on a CPU
TOLERANCE = 1e-4  # mean |difference| of log-probs in float32


class Running:
    """An engine and the event loop it lives in, for tests that are plain functions."""

    def __init__(self, folder: Path, max_concurrency: int = 16, **engine: Any) -> None:
        self.runner = asyncio.Runner()
        before = {process.pid for process in multiprocessing.active_children()}
        self.engine: Engine = self(start_engine(folder, max_concurrency, **engine))
        self.processes = {process.pid for process in multiprocessing.active_children()} - before

    def __call__(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(work)

    def generate(self, prompt: list[int], **limits: Any) -> Completion:
        completion: Completion = self(self.engine.generate(prompt, **limits))
        return completion

    def score(self, token_ids: list[int]) -> np.ndarray:
        scores: np.ndarray = self(self.engine.logprobs(token_ids))
        return scores

    def load(self, version: int, seed: int | None = None) -> Any:
        """Load weights of a seed, by default the version; returns their model."""
        model = tiny_model(version if seed is None else seed)
        self(load(self.engine, version, model))
        return model

    def close(self) -> None:
        self(self.engine.close())
        self.runner.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder, seed=0)
    return folder


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Running]:
    running = Running(folder)
    yield running
    running.close()


@pytest.fixture
def small(folder: Path) -> Iterator[Running]:
    """An engine of the test's own that runs four requests at a time."""
    running = Running(folder, max_concurrency=4)
    yield running
    running.close()


def error_of(completion: Completion, prompt: list[int], model: Any, temperature: float = 1.0) -> float:
    """Mean |difference| between recorded log-probs and those of transformers."""
    reference = reference_logprobs(model, prompt + completion.token_ids.tolist(), temperature)
    return float(np.abs(reference[len(prompt) :] - completion.logprobs).mean())


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_recorded_logprobs_are_transformers_after_temperature(running: Running, temperature: float) -> None:
    model = running.load(1)
    for prompt in (random_prompt(seed, 20 + 10 * seed) for seed in range(2)):
        completion = running.generate(prompt, max_tokens=100, temperature=temperature)
        assert len(completion.logprobs) == len(completion.token_ids) > 0
        assert error_of(completion, prompt, model, temperature) < TOLERANCE


@pytest.mark.parametrize("length", [1, BLOCK, MAX_MODEL_LEN])
def test_scores_are_those_of_transformers(running: Running, length: int) -> None:
    model, token_ids = running.load(2), random_prompt(7, length)
    scores = running.score(token_ids)
    assert (scores.dtype, len(scores)) == (np.float32, length)
    assert np.abs(scores - reference_logprobs(model, token_ids)).mean() < TOLERANCE


def test_an_update_leaves_no_prefix_of_the_old_weights(running: Running) -> None:
    prompt = random_prompt(9, 2 * BLOCK + 20)
    running.load(3)
    running.generate(prompt, max_tokens=10)
    again = running.generate(prompt, max_tokens=1)
    assert again.cached_tokens == 2 * BLOCK  # so there is something stale to find
    counts = running.engine.counts
    assert (counts.cached % BLOCK, counts.queried >= 2 * len(prompt)) == (0, True)
    assert 0 < counts.cached < counts.queried
    model = running.load(4)
    assert error_of(running.generate(prompt, max_tokens=30), prompt, model) < TOLERANCE
    assert np.abs(running.score(prompt) - reference_logprobs(model, prompt)).mean() < TOLERANCE
    # Nor where a version's number comes again, with other weights.
    running.load(3, seed=6)
    assert error_of(running.generate(prompt, max_tokens=30), prompt, tiny_model(6)) < TOLERANCE


def test_a_later_turn_may_read_its_episodes_prefix_cache(running: Running) -> None:
    prompt = random_prompt(13, 2 * BLOCK + 20)
    running.load(7)
    first = running.generate(prompt, max_tokens=10)
    model, context = running.load(8), prompt + first.token_ids.tolist()
    kept = running.generate(context, max_tokens=20, prefix_epoch=first.prefix_epoch)
    assert (kept.cached_tokens, kept.prefix_epoch) == (2 * BLOCK, first.prefix_epoch)
    assert kept.versions == [(8, 0, len(kept.token_ids))]
    assert error_of(kept, context, model) > TOLERANCE  # the price: keys and values of other weights
    # No other request meets them: not another episode with the same tokens, and no score.
    other = running.generate(context, max_tokens=20)
    assert (other.cached_tokens, other.prefix_epoch) == (0, first.prefix_epoch + 1)
    assert error_of(other, context, model) < TOLERANCE
    assert np.abs(running.score(context) - reference_logprobs(model, context)).mean() < TOLERANCE


def test_requests_in_flight_and_waiting_live_through_an_update(small: Running) -> None:
    """Four run at a time and the rest wait behind them; all share a prefix that the old weights have cached."""
    engine, models = small.engine, (tiny_model(0), tiny_model(11))
    assert engine.version == 0, "the model on disk"
    prefix = random_prompt(12, 2 * BLOCK)
    prompts = [prefix + random_prompt(100 + i, 10) for i in range(24)]

    async def update_in_the_middle() -> list[Completion]:
        await engine.generate(prefix, max_tokens=1)
        requests = [asyncio.ensure_future(engine.generate(prompt, max_tokens=200)) for prompt in prompts]
        await asyncio.wait(requests, return_when=asyncio.FIRST_COMPLETED)
        await load(engine, 1, models[1])
        return await asyncio.gather(*requests)

    kinds = set()
    for prompt, completion in zip(prompts, small(update_in_the_middle()), strict=True):
        versions = [version for version, _, _ in completion.versions]
        assert versions in ([0], [1], [0, 1])
        kinds.add(tuple(versions))
        borders = [completion.versions[0][1], *(end for _, _, end in completion.versions)]
        assert borders == sorted(set(borders))
        assert (borders[0], borders[-1]) == (0, len(completion.token_ids))
        # Those that waited read their prompt with the new weights, though the old ones had it cached.
        same = completion.versions[0][2]
        first = Completion(completion.token_ids[:same], completion.logprobs[:same], [], "")
        assert error_of(first, prompt, models[versions[0]]) < TOLERANCE
    assert kinds == {(0,), (0, 1), (1,)}


@pytest.mark.parametrize("way", ["direct", "layerwise"])
def test_both_ways_of_loading_give_the_models_logprobs(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    from generator.weights.direct_load import DirectLoad

    # Its files have the tied output layer too, as some models do; an update has the embedding alone.
    folder = shutil.copytree(folder, tmp_path / "model")
    file = next(folder.glob("*.safetensors"))
    weights = load_file(file)
    save_file(weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}, file, {"format": "pt"})
    real = DirectLoad.of

    def of(model: torch.nn.Module, config: Any) -> DirectLoad | None:
        direct = real(model, config)
        assert direct is not None  # of this model, which vLLM leaves as it is but for packing
        return direct if way == "direct" else None

    monkeypatch.setattr(DirectLoad, "of", of)  # in the engine's process too, which is a fork of this one
    running = Running(folder, max_concurrency=4)
    for version in (1, 2):
        model, prompt = running.load(version), random_prompt(version, 30)
        assert error_of(running.generate(prompt, max_tokens=20), prompt, model) < TOLERANCE
    running.close()


def test_stop_tokens_end_a_response_and_belong_to_it(running: Running) -> None:
    completion = running.generate(random_prompt(0, 5), max_tokens=400, stop_token_ids=range(128))
    assert completion.finish_reason == "stop"
    assert completion.token_ids[-1] < 128
    assert all(completion.token_ids[:-1] >= 128)
    with pytest.raises(ValueError, match="maximum model length"):
        running.generate(random_prompt(0, MAX_MODEL_LEN), max_tokens=1)


def test_weights_of_another_model_end_the_engine(small: Running) -> None:
    with pytest.raises(EngineDied, match="version 1"):
        small(load(small.engine, 1, torch.nn.ModuleDict({"other": torch.nn.Linear(3, 3)})))
    with pytest.raises(EngineDied):
        small.generate([1, 2, 3], max_tokens=1)


def test_an_unreadable_model_is_named(tmp_path: Path, folder: Path) -> None:
    path = shutil.copytree(folder, tmp_path / "model")
    os.truncate(path / "model.safetensors", 1000)
    with pytest.raises(UserError, match=rf"model\.path = '{path}'"):
        asyncio.run(Engine.start(engine_config(path), get_logger()))


def test_an_engine_that_hangs_or_is_killed_is_noticed(small: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "1")

    async def stop_and_kill() -> None:
        request = asyncio.ensure_future(small.engine.generate(random_prompt(0, 10), max_tokens=500, stop_token_ids=[]))
        await asyncio.sleep(0)
        for signal_, words in ((signal.SIGSTOP, "vLLM hangs"), (signal.SIGKILL, "is gone")):
            for pid in small.processes:
                os.kill(pid, signal_)
            with pytest.raises(EngineDied, match=words):
                await asyncio.wait_for(small.engine.watch(0.2), 60)
        with pytest.raises(EngineDied):
            await request

    small(stop_and_kill())
