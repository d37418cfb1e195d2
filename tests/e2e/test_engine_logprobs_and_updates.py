"""The real vLLM engine: its log-probs are the model's, and after an update nothing of the old weights is left."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import shutil
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from common.errors import UserError
from common.log import get_logger
from generator.engine.engine import Completion, Engine, EngineDied
from generator.weights.direct_load import DirectLoad
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

    def __init__(self, folder: Path, max_concurrency: int = 16) -> None:
        self.runner = asyncio.Runner()
        before = {process.pid for process in multiprocessing.active_children()}
        self.engine: Engine = self(start_engine(folder, max_concurrency))
        self.processes = {process.pid for process in multiprocessing.active_children()} - before

    def __call__(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(work)

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
def test_recorded_logprobs_are_those_of_transformers_after_temperature(running: Running, temperature: float) -> None:
    async def check() -> None:
        await load(running.engine, 1, tiny_model(1))
        prompts = [random_prompt(seed, 20 + 10 * seed) for seed in range(8)]
        sampled = await asyncio.gather(
            *(running.engine.generate(prompt, max_tokens=100, temperature=temperature) for prompt in prompts)
        )
        for prompt, completion in zip(prompts, sampled, strict=True):
            assert len(completion.logprobs) == len(completion.token_ids) > 0
            assert error_of(completion, prompt, tiny_model(1), temperature) < TOLERANCE

    running(check())


@pytest.mark.parametrize("length", [1, 2, BLOCK, 300, MAX_MODEL_LEN])
def test_scores_are_those_of_transformers(running: Running, length: int) -> None:
    async def check() -> None:
        await load(running.engine, 2, tiny_model(2))
        token_ids = random_prompt(7, length)
        scores = await running.engine.score(np.asarray(token_ids, np.int32))
        assert scores.dtype == np.float32
        assert len(scores) == length
        assert np.abs(scores - reference_logprobs(tiny_model(2), token_ids)).mean() < TOLERANCE

    running(check())


def test_an_update_leaves_no_prefix_of_the_old_weights(running: Running) -> None:
    async def check() -> None:
        engine = running.engine
        prompt = random_prompt(9, 2 * BLOCK + 20)
        await load(engine, 3, tiny_model(3))
        await engine.generate(prompt, max_tokens=10)
        again = await engine.generate(prompt, max_tokens=1)
        assert again.cached_tokens == 2 * BLOCK  # so there is something stale to find
        await load(engine, 4, tiny_model(4))
        completion = await engine.generate(prompt, max_tokens=30)
        assert error_of(completion, prompt, tiny_model(4)) < TOLERANCE
        greedy = await engine.generate(prompt, max_tokens=10, temperature=0.0)
        assert greedy.token_ids.tolist() == greedily(tiny_model(4), prompt, 10)
        scores = await engine.score(prompt)
        assert np.abs(scores - reference_logprobs(tiny_model(4), prompt)).mean() < TOLERANCE

    running(check())


def test_a_later_turn_reads_what_its_episode_has_cached_if_it_asks_for_it(running: Running) -> None:
    async def check() -> None:
        engine = running.engine
        prompt = random_prompt(13, 2 * BLOCK + 20)
        await load(engine, 7, tiny_model(7))
        first = await engine.generate(prompt, max_tokens=10)
        await load(engine, 8, tiny_model(8))
        context = prompt + first.token_ids.tolist()
        kept = await engine.generate(context, max_tokens=20, prefix_epoch=first.prefix_epoch)
        assert (kept.cached_tokens, kept.prefix_epoch) == (2 * BLOCK, first.prefix_epoch)
        assert kept.versions == [(8, 0, len(kept.token_ids))]
        assert error_of(kept, context, tiny_model(8)) > TOLERANCE  # the price: keys and values of other weights
        # Nobody else meets them: not another episode with the same tokens, and no score.
        other = await engine.generate(context, max_tokens=20)
        assert (other.cached_tokens, other.prefix_epoch) == (0, first.prefix_epoch + 1)
        assert error_of(other, context, tiny_model(8)) < TOLERANCE
        scores = await engine.score(context)
        assert np.abs(scores - reference_logprobs(tiny_model(8), context)).mean() < TOLERANCE

    running(check())


def test_a_version_number_that_comes_again_finds_nothing_of_its_first_time(running: Running) -> None:
    async def check() -> None:
        engine = running.engine
        prompt = random_prompt(10, 2 * BLOCK + 20)
        await load(engine, 5, tiny_model(5))
        await engine.generate(prompt, max_tokens=1)
        await load(engine, 4, tiny_model(4))
        await load(engine, 5, tiny_model(6))
        completion = await engine.generate(prompt, max_tokens=30)
        assert error_of(completion, prompt, tiny_model(6)) < TOLERANCE

    running(check())


@torch.no_grad()
def greedily(model: Any, prompt: list[int], tokens: int) -> list[int]:
    ids = list(prompt)
    while len(ids) < len(prompt) + tokens and (len(ids) == len(prompt) or ids[-1] != model.config.eos_token_id):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_requests_in_flight_and_waiting_live_through_an_update(small: Running) -> None:
    """Four run at a time and the rest wait behind them; all share a prefix that the old weights have cached."""

    async def check() -> None:
        engine = small.engine
        old, new = tiny_model(0), tiny_model(11)
        assert engine.version == 0, "the model on disk"
        prefix = random_prompt(12, 2 * BLOCK)
        prompts = [prefix + random_prompt(100 + i, 10) for i in range(24)]
        await engine.generate(prefix, max_tokens=1)
        requests = [asyncio.ensure_future(engine.generate(prompt, max_tokens=200)) for prompt in prompts]
        await asyncio.wait(requests, return_when=asyncio.FIRST_COMPLETED)
        await load(engine, 1, new)
        sampled = await asyncio.gather(*requests)
        kinds = set()
        for prompt, completion in zip(prompts, sampled, strict=True):
            versions = [version for version, _, _ in completion.versions]
            assert versions in ([0], [1], [0, 1])
            kinds.add(tuple(versions))
            borders = [completion.versions[0][1], *(end for _, _, end in completion.versions)]
            assert borders == sorted(set(borders))
            assert (borders[0], borders[-1]) == (0, len(completion.token_ids))
            # Those that waited read their prompt with the new weights, though the old ones had it cached.
            if versions != [0, 1]:
                assert error_of(completion, prompt, (old, new)[versions[0]]) < TOLERANCE
            else:
                before = completion.versions[0][2]
                first = Completion(completion.token_ids[:before], completion.logprobs[:before], [], "")
                assert error_of(first, prompt, old) < TOLERANCE
        assert kinds == {(0,), (0, 1), (1,)}

    small(check())


@pytest.mark.parametrize("way", ["direct", "layerwise"])
def test_both_ways_of_loading_give_the_models_logprobs(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
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

    async def check() -> None:
        for version in (1, 2):
            await load(running.engine, version, tiny_model(version))
            completion = await running.engine.generate(random_prompt(version, 30), max_tokens=20)
            assert error_of(completion, random_prompt(version, 30), tiny_model(version)) < TOLERANCE

    running(check())
    running.close()


def test_stop_tokens_end_a_response_and_a_prompt_needs_room(running: Running) -> None:
    async def check() -> None:
        completion = await running.engine.generate(random_prompt(0, 5), max_tokens=400, stop_token_ids=range(128))
        assert completion.finish_reason == "stop"
        assert completion.token_ids[-1] < 128
        assert all(completion.token_ids[:-1] >= 128)
        with pytest.raises(ValueError, match="maximum model length"):
            await running.engine.generate(random_prompt(0, MAX_MODEL_LEN), max_tokens=1)

    running(check())


def test_weights_of_another_model_end_the_engine(small: Running) -> None:
    async def check() -> None:
        other = torch.nn.ModuleDict({"other": torch.nn.Linear(3, 3)})
        with pytest.raises(EngineDied, match="version 1"):
            await load(small.engine, 1, other)
        with pytest.raises(EngineDied):
            await small.engine.generate([1, 2, 3], max_tokens=1)

    small(check())


UNKNOWN = '{"architectures": ["NoSuchModel"], "model_type": "no_such_type"}'
DAMAGE: dict[str, Callable[[Path], object]] = {
    "no folder": lambda path: shutil.rmtree(path),
    "broken config": lambda path: (path / "config.json").write_text("{"),
    "no weights": lambda path: (path / "model.safetensors").unlink(),
    "truncated weights": lambda path: os.truncate(path / "model.safetensors", 1000),
    "unknown architecture": lambda path: (path / "config.json").write_text(UNKNOWN),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_an_unreadable_model_is_named(tmp_path: Path, folder: Path, damage: str) -> None:
    path = shutil.copytree(folder, tmp_path / "model")
    DAMAGE[damage](path)
    with pytest.raises(UserError, match=rf"model\.path = '{path}'"):
        asyncio.run(Engine.start(engine_config(path), get_logger()))


def test_an_engine_whose_process_is_killed_is_noticed(small: Running) -> None:
    async def check() -> None:
        request = asyncio.ensure_future(small.engine.generate(random_prompt(0, 10), max_tokens=500, stop_token_ids=[]))
        await asyncio.sleep(0)
        for process in multiprocessing.active_children():
            if process.pid in small.processes:
                process.kill()
        with pytest.raises(EngineDied):
            await request
        with pytest.raises(EngineDied):
            small.engine.check()

    small(check())


def test_the_users_engine_arguments_win(folder: Path) -> None:
    with pytest.raises(UserError, match="no_such_argument"):
        asyncio.run(Engine.start(engine_config(folder, no_such_argument=1), get_logger()))
