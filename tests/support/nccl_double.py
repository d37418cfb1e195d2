"""NCCL at its boundary, in one process: groups of threads, and the real receiving engine on top of it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from generator.weights.nccl_weights import NcclWeights
from learner.nccl import NcclError

PATIENCE = 120.0  # seconds until a test gives up


class FakeNccl:
    """Makes groups whose members are threads; as `learner.nccl.Nccl` does for rank 0."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.rendezvous_by_id: dict[bytes, Rendezvous] = {}
        self._made = 0

    def unique_id(self) -> bytes:
        self._made += 1
        made = self._made.to_bytes(4, "big").ljust(128, b"\0")
        self.rendezvous_by_id[made] = Rendezvous()
        return made

    def join(self, unique_id: bytes, size: int) -> FakeCommunicator:
        rendezvous = self.rendezvous_by_id[unique_id]
        rendezvous.enter(size)
        return FakeCommunicator(rendezvous, size)

    def worker(self, unique_id: bytes, rank: int, size: int, device: Any) -> FakeWorkerGroup:
        """What vLLM's `uid_init_process_group` gives a worker."""
        rendezvous = self.rendezvous_by_id[unique_id]
        rendezvous.enter(size)
        return FakeWorkerGroup(rendezvous, rank)


class Rendezvous:
    """All who hold one id: they wait until they are complete, and agree on how many they are."""

    def __init__(self) -> None:
        self.inbox: dict[int, queue.SimpleQueue[torch.Tensor]] = {}
        self._lock = threading.Lock()
        self._barrier: threading.Barrier | None = None

    def enter(self, size: int) -> None:
        with self._lock:
            if self._barrier is None:
                self._barrier = threading.Barrier(size)
                self.inbox = {rank: queue.SimpleQueue() for rank in range(1, size)}
        assert self._barrier.parties == size
        try:
            self._barrier.wait(PATIENCE)
        except threading.BrokenBarrierError:
            raise NcclError("nobody came") from None


class FakeCommunicator:
    """Rank 0."""

    def __init__(self, rendezvous: Rendezvous, size: int) -> None:
        self._rendezvous, self._size = rendezvous, size

    def broadcast(self, piece: torch.Tensor, buffer: torch.Tensor, alive: Callable[[], bool]) -> None:
        data = buffer[: len(piece)].copy_(piece)
        taken = [threading.Event() for _ in range(1, self._size)]
        for rank, event in enumerate(taken, 1):
            self._rendezvous.inbox[rank].put((data, event))
        for event in taken:
            while not event.wait(0.01):
                if not alive():
                    raise NcclError("the generator does not receive")

    def abort(self) -> None:
        pass


class FakeWorkerGroup:
    """Any other rank, as vLLM's engine calls it."""

    def __init__(self, rendezvous: Rendezvous, rank: int) -> None:
        self.rank = rank
        self._inbox = rendezvous.inbox[rank]

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        data, taken = self._inbox.get(timeout=PATIENCE)
        assert src == 0
        assert data.shape == tensor.shape, "the two sides cut the snapshot differently"
        tensor.copy_(data)
        taken.set()

    def destroy(self) -> None:
        pass


class Worker:
    """The real `NcclWeightEngine`, with a model that keeps what it is given."""

    def __init__(self, rank: int) -> None:
        from generator.weights.nccl_engine import NcclWeightEngine

        self.loaded: dict[str, torch.Tensor] = {}
        parallel = SimpleNamespace(data_parallel_index=0, world_size=1, rank=rank)
        self.engine = NcclWeightEngine(
            SimpleNamespace(backend="nccl"),
            SimpleNamespace(parallel_config=parallel, model_config=SimpleNamespace(hf_text_config=SimpleNamespace())),
            torch.device("cpu"),
            SimpleNamespace(load_weights=self._load),
        )

    def _load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.loaded.update((name, tensor.clone()) for name, tensor in weights)


class Workers:
    """Those of one generator, side by side, as its engine has them."""

    def __init__(self, count: int) -> None:
        self.members = [Worker(rank) for rank in range(count)]
        self.joins = 0

    async def join(self, info: dict[str, Any]) -> None:
        import asyncio

        self.joins += 1
        await asyncio.gather(
            *(
                asyncio.to_thread(lambda engine: engine.init_transfer_engine(engine.parse_init_info(info)), each.engine)
                for each in self.members
            )
        )

    async def receive(self, weights: NcclWeights) -> None:
        import asyncio

        with weights:
            info = weights.update_info()
            await asyncio.gather(
                *(
                    asyncio.to_thread(
                        lambda engine: engine.receive_weights(engine.parse_update_info(info)), each.engine
                    )
                    for each in self.members
                )
            )

    def have(self, expected: dict[str, torch.Tensor]) -> bool:
        """Whether all of them hold exactly these tensors."""
        return all(
            each.loaded.keys() == expected.keys()
            and all(torch.equal(each.loaded[name], tensor) for name, tensor in expected.items())
            for each in self.members
        )


def meet_here(monkeypatch: pytest.MonkeyPatch, nccl: FakeNccl) -> None:
    """Let workers meet in our groups."""
    from vllm.distributed.weight_transfer import nccl_common

    monkeypatch.setattr(nccl_common.torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(nccl_common, "uid_init_process_group", nccl.worker)
