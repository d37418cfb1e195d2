"""The learner's ranks and the few things they tell each other."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from common.errors import UserError
from learner.meeting import Meeting, card_towards, read_meeting

Result = TypeVar("Result")
# What gloo, NCCL and torch say when a rank has gone, of which they have no common type of error.
LOST = ("gloo", "nccl", "connection closed", "connection reset", "connection refused", "broken pipe", "timed out")


class NotMet(RuntimeError):
    """The ranks did not come together. Another time they may, so this is no `UserError`."""


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

    def any(self, condition: bool) -> bool:
        """Whether it holds on some rank."""
        return self.maxima([float(condition)])[0] > 0

    def share(self, data: bytes = b"", source: int = 0) -> bytes:
        """What the rank `source` gives, on every rank."""
        if self.size == 1:
            return data
        size = torch.tensor([len(data)], device=self.device)
        dist.broadcast(size, source)
        buffer = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8).to(self.device)
        if self.rank != source:
            buffer = torch.zeros(max(1, int(size)), dtype=torch.uint8, device=self.device)
        if int(size):
            dist.broadcast(buffer, source)
        return bytes(buffer.cpu().numpy())[: int(size)]

    def together(self, act: Callable[[], Result]) -> Result:
        """Do something on every rank; what the user must mend on one of them ends all, each with a line that says it.

        Raises:
            UserError: on every rank, if `act` raised it on any.
        """
        if self.size == 1:
            return act()
        refusal: UserError | None = None
        try:
            result = act()
        except UserError as error:
            refusal = error
        # The lowest rank that refuses counts most.
        refuses = int(self.maxima([float(self.size - self.rank) if refusal else 0.0])[0])
        if not refuses:
            return result
        source = self.size - refuses
        reason = self.share(str(refusal or "").encode(), source).decode()
        raise refusal or UserError(f"rank {source}: {reason}")

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            dist.barrier()


def start() -> World:
    """Join the ranks that the launcher (`deepspeed`, `torchrun`, or none) started.

    Raises:
        UserError: the environment does not say how, or the port to meet at is taken.
        NotMet: the others did not come, or cannot be reached.
    """
    meeting = read_meeting(os.environ)
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", meeting.local_rank) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    # DeepSpeed asks for it and would otherwise look for MPI.
    os.environ.setdefault("LOCAL_RANK", str(meeting.local_rank))
    if not dist.is_initialized():
        backend = "nccl" if has_gpu else "gloo"
        if meeting.size == 1:
            # Alone, no port is needed to meet at.
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        else:
            _meet(meeting, backend)
    return World(meeting.rank, meeting.size, device)


def stop() -> None:
    """Leave the ranks."""
    if dist.is_initialized():
        dist.destroy_process_group()


def loss(error: RuntimeError) -> str | None:
    """What to say where a call failed because other ranks have gone, or did not come; None for all else."""
    if isinstance(error, NotMet):
        return str(error)
    if any(sign in str(error).lower() for sign in LOST):
        reason = " ".join(str(error).split())[:200]
        return f"another rank has gone; start all ranks again, they go on from the checkpoint ({reason})"
    return None


def _meet(meeting: Meeting, backend: str) -> None:
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        card = card_towards(meeting)
        if card is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = card
    try:
        dist.init_process_group(backend)
    except (RuntimeError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        card = os.environ.get("GLOO_SOCKET_IFNAME", "any network card")
        said = (
            f"rank {meeting.rank} of {meeting.size} did not meet the others at {meeting.address}:{meeting.port} (over "
            f"{card}): {reason}"
        )
        if "EADDRINUSE" in reason:
            raise UserError(f"{said}; stop what uses the port, or give all ranks another MASTER_PORT") from None
        raise NotMet(
            f"{said}; rank 0 must be reachable there, and every rank at the address of its own network card "
            "(GLOO_SOCKET_IFNAME); start all ranks again"
        ) from None
