"""The learner's ranks and the few things they tell each other."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class World:
    """This process among the learner's ranks, and where its tensors live."""

    rank: int
    size: int
    device: torch.device

    @property
    def leads(self) -> bool:
        """Whether this rank talks to Redis, serves weights and writes metrics."""
        return self.rank == 0

    def sums(self, values: list[float]) -> list[float]:
        """Each value summed over all ranks."""
        if self.size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        return tensor.tolist()

    def maxima(self, values: list[float]) -> list[float]:
        """The largest of each value over all ranks."""
        if self.size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor.tolist()

    def share(self, data: bytes = b"") -> bytes:
        """What rank 0 gives, on every rank."""
        if self.size == 1:
            return data
        size = torch.tensor([len(data)], device=self.device)
        dist.broadcast(size, 0)
        buffer = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8).to(self.device)
        if not self.leads:
            buffer = torch.zeros(max(1, int(size)), dtype=torch.uint8, device=self.device)
        if int(size):
            dist.broadcast(buffer, 0)
        return bytes(buffer.cpu().numpy())[: int(size)]

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            dist.barrier()


def start() -> World:
    """Join the ranks that the launcher (`deepspeed`, `torchrun`, or none) started."""
    has_gpu = torch.cuda.is_available()
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        backend = "nccl" if has_gpu else "gloo"
        if size == 1:
            # Alone, no port is needed to meet at; DeepSpeed still asks where on the machine it is.
            os.environ.setdefault("LOCAL_RANK", "0")
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        else:
            dist.init_process_group(backend)
    return World(rank, size, device)


def stop() -> None:
    """Leave the ranks."""
    if dist.is_initialized():
        dist.destroy_process_group()
