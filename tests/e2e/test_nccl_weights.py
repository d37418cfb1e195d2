"""The backend `nccl`: the learner's end, and the engine in vLLM's workers, with NCCL itself replaced by threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common.config import WeightsConfig
from common.errors import UserError
from generator.engine.arguments import engine_arguments, start_llm
from generator.engine.engine import Engine, EngineDied
from generator.weights.nccl_weights import NcclBackend, NcclWeights
from generator.weights.weight_client import WeightClient
from learner import nccl_groups
from learner.weight_copy import take_snapshot
from learner.weight_server import WeightServer
from tests.support.engine import engine_config, save_tiny_model
from tests.support.nccl_double import PATIENCE, FakeNccl, Workers, meet_here
from tests.support.weights import eventually, random_weights

pytestmark = pytest.mark.e2e

CONFIG = WeightsConfig(backend="nccl")
SMALL = (1 << 20) - 3  # bytes of a piece, so that a snapshot takes several
SHORT = 1.0  # seconds of silence after which a group is given up; a client that waits says something every 2 s


class Learner:
    """Serves, and may start anew at another address."""

    def __init__(self, nccl: FakeNccl) -> None:
        self._nccl = nccl
        self.server = self._start()

    def _start(self) -> WeightServer:
        return WeightServer(CONFIG, nccl=lambda: self._nccl)

    def publish(self, version: int, weights: dict[str, torch.Tensor]) -> None:
        self.server.publish(version, weights.items(), torch.float32)

    def restart(self) -> None:
        self.server.close()
        self.server = self._start()


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> FakeNccl:
    made = FakeNccl()
    meet_here(monkeypatch, made)
    monkeypatch.setattr(nccl_groups, "PIECE_BYTES", SMALL)
    return made


@pytest.fixture
def learner(nccl: FakeNccl) -> Iterator[Learner]:
    made = Learner(nccl)
    yield made
    made.server.close()


def groups() -> int:
    """NCCL groups that the learner keeps."""
    return sum(thread.name == "nccl-group" for thread in threading.enumerate())


def play(act: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(act(), PATIENCE))


def follow(learner: Learner, workers: Workers) -> WeightClient:
    return client_of(learner, len(workers.members), workers.join)


def client_of(
    learner: Learner, workers: int, join: Callable[[dict[str, Any]], Coroutine[Any, Any, None]]
) -> WeightClient:
    return WeightClient(
        lambda: learner.server.endpoint(), CONFIG, backend=lambda deliver: NcclBackend(workers, join, deliver)
    )


def test_all_workers_of_all_generators_get_each_version_bit_by_bit(learner: Learner) -> None:
    async def act() -> None:
        generators = [Workers(1), Workers(4)]
        clients = [follow(learner, workers) for workers in generators]
        try:
            for version in range(3):
                weights = random_weights(seed=version)
                learner.publish(version, weights)
                for client, workers in zip(clients, generators, strict=True):
                    arriving = await client.next()
                    assert arriving.version == version
                    await workers.receive(arriving)
                    assert workers.have(weights)
            assert [workers.joins for workers in generators] == [1, 1]
        finally:
            for client in clients:
                client.close()

    play(act)


def test_a_new_generator_gets_the_newest_weights_and_the_others_continue(learner: Learner) -> None:
    async def act() -> None:
        first, second = Workers(2), Workers(1)
        learner.publish(0, random_weights(seed=0))
        early = follow(learner, first)
        await first.receive(await early.next())
        weights = random_weights(seed=7)
        learner.publish(7, weights)
        late = follow(learner, second)
        for client, workers in ((late, second), (early, first)):
            arriving = await client.next()
            assert arriving.version == 7
            await workers.receive(arriving)
            assert workers.have(weights)
        early.close()
        late.close()

    play(act)


def test_a_learner_that_starts_anew_is_met_in_another_group(learner: Learner) -> None:
    async def act() -> None:
        workers = Workers(2)
        learner.publish(5, random_weights(seed=5))
        client = follow(learner, workers)
        await workers.receive(await client.next())
        learner.restart()
        # The same version again, with other weights: it resumed from a checkpoint.
        weights = random_weights(seed=55)
        learner.publish(5, weights)
        await workers.receive(await client.next())
        assert workers.have(weights)
        assert workers.joins == 2
        client.close()

    play(act)


def test_a_generator_that_dies_while_it_receives_delays_no_other(
    learner: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act() -> None:
        dying, living = Workers(1), Workers(1)
        learner.publish(0, random_weights(seed=0))
        with monkeypatch.context() as patch:
            patch.setattr(nccl_groups, "SILENCE", SHORT)
            gone = follow(learner, dying)
            await gone.next()  # the learner is sending, and nobody takes it
            gone.close()
        client = follow(learner, living)
        await living.receive(await client.next())
        weights = random_weights(seed=1)
        learner.publish(1, weights)
        await living.receive(await client.next())
        assert living.have(weights)
        await asyncio.to_thread(eventually, lambda: groups() == 1)
        client.close()

    play(act)


def test_memory_that_is_being_sent_is_not_written_to(learner: Learner) -> None:
    async def act() -> None:
        workers = Workers(1)
        first = random_weights(seed=0)
        learner.publish(0, first)
        client = follow(learner, workers)
        slow = await client.next()
        for version in range(1, 5):
            learner.publish(version, random_weights(seed=version))
        await workers.receive(slow)
        assert workers.have(first)
        newest = await client.next()
        assert newest.version == 4
        await workers.receive(newest)
        assert workers.have(random_weights(seed=4))
        client.close()

    play(act)


def test_a_group_that_the_learner_gave_up_is_met_again(learner: Learner, monkeypatch: pytest.MonkeyPatch) -> None:
    async def act() -> None:
        workers = Workers(2)
        learner.publish(0, random_weights(seed=0))
        with monkeypatch.context() as patch:
            patch.setattr(nccl_groups, "SILENCE", SHORT)
            client = follow(learner, workers)
            await workers.receive(await client.next())
        await asyncio.to_thread(eventually, lambda: groups() == 0)
        weights = random_weights(seed=1)
        learner.publish(1, weights)
        await workers.receive(await client.next())
        assert workers.have(weights)
        assert workers.joins == 2
        client.close()

    play(act)


def test_an_engine_that_cannot_join_is_the_callers_error(learner: Learner) -> None:
    async def refuse(info: dict[str, Any]) -> None:
        raise EngineDied("no NCCL here")

    async def act() -> None:
        learner.publish(0, random_weights(seed=0))
        client = client_of(learner, 1, refuse)
        with pytest.raises(EngineDied, match="no NCCL here"):
            await client.next()
        client.close()

    play(act)


class FakeLLM:
    """As much of vLLM's `AsyncLLM` as an update of the weights touches."""

    def __init__(self, workers: int, copies: int) -> None:
        self.calls: list[Any] = []
        self.errored = False
        self.model_config = SimpleNamespace(max_model_len=64)
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(world_size=workers, data_parallel_size=copies)
        )
        self.output_processor = SimpleNamespace(request_states={})
        self.engine_core = SimpleNamespace(pause_scheduler_async=self._nothing, resume_scheduler_async=self._nothing)
        self.start_weight_update = self.abort = self.finish_weight_update = self._nothing

    def get_tokenizer(self) -> None:
        return None

    async def _nothing(self, *_: Any, **__: Any) -> None:
        pass

    async def init_weight_transfer_engine(self, request: Any) -> None:
        self.calls.append(request.init_info)

    async def shutdown_weight_transfer_engine(self) -> None:
        self.calls.append("left")

    async def update_weights(self, request: Any) -> None:
        await asyncio.Event().wait()


def test_all_workers_of_all_copies_join_and_leave_the_group_before() -> None:
    async def act() -> None:
        llm = FakeLLM(workers=4, copies=2)
        engine = Engine(llm)
        assert engine.workers == 8
        await engine.join({"world_size": 9})
        await engine.join({"world_size": 9, "again": True})
        assert llm.calls == [{"world_size": 9}, "left", {"world_size": 9, "again": True}]

    play(act)


def test_weights_that_never_arrive_end_the_engine_instead_of_waiting_for_ever() -> None:
    async def act() -> None:
        weights = NcclWeights(take_snapshot(3, random_weights(0).items(), torch.float32, SMALL).manifest)
        weights.timeout = 0.05
        with pytest.raises(EngineDied, match="cannot load weights of version 3: TimeoutError"):
            await Engine(FakeLLM(1, 1)).load(3, weights)

    play(act)


def test_without_a_gpu_the_backend_is_refused_with_the_other(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, seed=0)
    config = engine_config(tmp_path)
    nccl = config.model_copy(update={"learner": config.learner.model_copy(update={"weights": CONFIG})})
    assert engine_arguments(nccl)["weight_transfer_config"] == {"backend": "spo_nccl"}
    with pytest.raises(UserError, match="learner.weights.backend = 'nccl' needs a GPU.*; set it to zmq"):
        start_llm(nccl)
