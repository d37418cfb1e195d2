"""The learner's ranks: the few collectives they use, and the checks that they agree before they train."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from common.config import Config, differences
from common.errors import UserError, first_line
from common.release import release
from common.streams.broker import Broker
from learner.ranks.rank import Rendezvous, network_interface_towards, read_rendezvous
from learner.ranks.ulysses import SequenceGroup

Result = TypeVar("Result")
# Words in the errors of gloo, NCCL and torch when a rank has died; there is no common exception for it.
LOST_RANK_SIGNS = (
    "gloo",
    "nccl",
    "connection closed",
    "connection reset",
    "connection refused",
    "broken pipe",
    "timed out",
)


class RendezvousError(RuntimeError):
    """The ranks could not connect to each other. The next attempt may succeed, so this is not a `UserError`."""


@dataclass(frozen=True, slots=True)
class World:
    """This process among the learner's ranks, and where its tensors live.

    Attributes:
        group: gloo group of the collectives below, with its own time-out. Gradients and weights go through the
            default group, which is NCCL's on GPUs.
        sequence: the ranks that hold slices of the sequences that this one trains on; if None, it holds them whole.
    """

    rank: int
    size: int
    device: torch.device
    group: dist.ProcessGroup | None = None
    sequence: SequenceGroup | None = None

    @property
    def is_main(self) -> bool:
        """Whether this rank talks to Redis, serves weights and writes metrics."""
        return self.rank == 0

    @property
    def shares(self) -> int:
        """Number of shares of a batch; ranks that hold slices of the same sequences have the same share."""
        return self.size // (self.sequence.size if self.sequence else 1)

    @property
    def share(self) -> int:
        """Number of this rank's share of a batch."""
        return self.rank // (self.sequence.size if self.sequence else 1)

    @property
    def counts_share(self) -> bool:
        """Whether this rank is the first of those with its share; only the first counts and records the share."""
        return self.sequence is None or self.sequence.rank == 0

    def in_groups(self, size: int) -> World:
        """These ranks in groups of `size` consecutive ones with slices of the same sequences; call it on all ranks."""
        if size == 1:
            return self
        group, _ = dist.new_subgroups(size)
        return replace(self, sequence=SequenceGroup(self.rank % size, size, group))

    def sum_over_shares(self, values: list[float]) -> list[float]:
        """Each value summed over the shares of a batch; of ranks with the same share, only the first contributes."""
        return self.all_reduce_sum(values if self.counts_share else [0.0] * len(values))

    def all_reduce_sum(self, values: list[float]) -> list[float]:
        """Each value summed over all ranks."""
        return self._all_reduce(values, dist.ReduceOp.SUM)

    def all_reduce_max(self, values: list[float]) -> list[float]:
        """The largest of each value over all ranks."""
        return self._all_reduce(values, dist.ReduceOp.MAX)

    def _all_reduce(self, values: list[float], operation: Any) -> list[float]:
        if self.size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, operation, group=self.group)
        return tensor.tolist()

    def any_rank(self, condition: bool) -> bool:
        """Whether the condition holds on some rank."""
        return self.all_reduce_max([float(condition)])[0] > 0

    def broadcast(self, data: bytes = b"", source: int = 0) -> bytes:
        """The bytes of rank `source`, on every rank."""
        if self.size == 1:
            return data
        size = torch.tensor([len(data)])
        dist.broadcast(size, source, group=self.group)
        if not size:
            return b""
        buffer = torch.empty(int(size), dtype=torch.uint8)
        if self.rank == source:
            buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        dist.broadcast(buffer, source, group=self.group)
        return bytes(buffer.numpy())

    def gather(self, data: bytes) -> list[bytes]:
        """The bytes of every rank, on every rank."""
        return [self.broadcast(data, source) for source in range(self.size)]

    def raise_on_all_ranks(self, act: Callable[[], Result]) -> Result:
        """Call `act` on every rank; a `UserError` on one of them is raised on all, so that all end with its message."""
        if self.size == 1:
            return act()
        own_error: UserError | None = None
        try:
            result = act()
        except UserError as error:
            own_error = error
        # The message is that of the lowest rank with an error.
        ranks_after = int(self.all_reduce_max([float(self.size - self.rank) if own_error else 0.0])[0])
        if not ranks_after:
            return result
        source = self.size - ranks_after
        message = self.broadcast(str(own_error or "").encode(), source).decode()
        raise own_error or UserError(f"rank {source}: {message}")

    def beside(self, timeout: float) -> World:
        """The same ranks with another group, which another thread may use at the same time; call it on all ranks."""
        if self.size == 1:
            return self
        return replace(self, group=dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout)))

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier(group=self.group)


def start(timeout: float = 1800.0) -> World:
    """Join the ranks that the launcher (`deepspeed`, `torchrun`, or none) started.

    Args:
        timeout: seconds that a rank waits for another one in the methods of `World`.

    Raises:
        UserError: the environment is incomplete, or MASTER_PORT is in use.
        RendezvousError: the other ranks did not join, or cannot be reached.
    """
    rendezvous = read_rendezvous(os.environ)
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rendezvous.local_rank) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    # DeepSpeed reads LOCAL_RANK, and would otherwise look for MPI.
    os.environ.setdefault("LOCAL_RANK", str(rendezvous.local_rank))
    if not dist.is_initialized():
        backend = "nccl" if has_gpu else "gloo"
        if rendezvous.world_size == 1:
            # A single rank needs no port.
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        else:
            _join(rendezvous, backend)
    group = None
    if rendezvous.world_size > 1:
        # Not NCCL: its watchdog would take a rank that waits for a disk or for Redis for one whose GPU hangs.
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
    return World(rendezvous.rank, rendezvous.world_size, device, group)


def stop() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def lost_rank_message(error: RuntimeError) -> str | None:
    """The message for a call that failed because other ranks died or never joined; None for any other failure."""
    if isinstance(error, RendezvousError):
        return str(error)
    if any(sign in str(error).lower() for sign in LOST_RANK_SIGNS):
        reason = " ".join(str(error).split())[:200]
        return f"another rank is gone; start all ranks again, they continue from the checkpoint ({reason})"
    return None


def _join(rendezvous: Rendezvous, backend: str) -> None:
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        interface = network_interface_towards(rendezvous)
        if interface is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = interface
    try:
        dist.init_process_group(backend)
    except (RuntimeError, ValueError) as error:
        reason = first_line(error)
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "any network interface")
        message = (
            f"rank {rendezvous.rank} of {rendezvous.world_size} did not meet the others at "
            f"{rendezvous.master_addr}:{rendezvous.master_port} (over {interface}): {reason}"
        )
        if "EADDRINUSE" in reason:
            raise UserError(f"{message}; stop what uses the port, or give all ranks another MASTER_PORT") from None
        raise RendezvousError(
            f"{message}; rank 0 must be reachable there, and every rank at the address of its own network interface "
            "(GLOO_SOCKET_IFNAME); start all ranks again"
        ) from None


MARKER_TTL = 3600  # seconds; the key is removed at once unless rank 0 dies in between
FILE_SYSTEM_DELAY = 5.0  # seconds that a network file system may take to show a new file


def check_ranks_agree(world: World, config: Config, broker: Broker) -> None:
    """Raise `UserError` on every rank if one has another release, configuration, Redis or run folder than rank 0."""
    if world.size == 1:
        return
    own = {"release": release(), "config": config.model_dump(mode="json", by_alias=True)}
    main: dict[str, Any] = json.loads(world.broadcast(json.dumps(own).encode() if world.is_main else b""))
    world.raise_on_all_ranks(lambda: _check_same(release(), config, main))
    token = world.broadcast(secrets.token_hex(8).encode() if world.is_main else b"").decode()
    marker = config.run.folder / f".ranks-{token}"
    try:
        world.raise_on_all_ranks(lambda: _create_marker(marker, broker, token) if world.is_main else None)
        world.raise_on_all_ranks(lambda: _check_marker(marker, broker, token))
    finally:
        if world.is_main:
            marker.unlink(missing_ok=True)
            broker.redis.delete(broker.key(f"ranks:{token}"))


def _check_same(here: str, config: Config, main: dict[str, Any]) -> None:
    if here != main["release"]:
        raise UserError(f"this rank runs SPO {here}, rank 0 {main['release']}; use the same release (image) for all")
    # Keys that are local to a machine may differ, except those for DeepSpeed.
    differing = [str(difference) for difference in differences(config, main["config"])]
    own, others = config.learner.deepspeed, main["config"]["learner"]["deepspeed"]
    if own != others:
        differing.append(f"learner.deepspeed (here {own!r}, {others!r})")
    if differing:
        raise UserError(
            f"this rank has another configuration than rank 0: {', '.join(differing)}; give all ranks the same file "
            "and overrides"
        )


def _create_marker(marker: Path, broker: Broker, token: str) -> None:
    try:
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()
    except OSError as error:
        raise UserError(f"run folder {marker.parent} cannot be written: {error.strerror}") from None
    broker.set(f"ranks:{token}", 1, MARKER_TTL)


def _check_marker(marker: Path, broker: Broker, token: str) -> None:
    if not broker.redis.exists(broker.key(f"ranks:{token}")):
        raise UserError("broker.url is another Redis than that of rank 0; give all ranks the address of one server")
    deadline = time.monotonic() + FILE_SYSTEM_DELAY
    while not marker.exists():
        if time.monotonic() > deadline:
            raise UserError(
                f"run folder {marker.parent} is not that of rank 0: each rank writes its piece of a checkpoint, so "
                "run.output_dir must be on a file system that all machines of the learner share"
            )
        time.sleep(0.1)
