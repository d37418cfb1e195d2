"""Where the learner's ranks meet: what a launcher says in the environment, and over which network card they talk."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass

import psutil  # comes with DeepSpeed

from common.address import is_loopback
from common.errors import UserError

MEETING = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """This process among the ranks, and where rank 0 waits for the others.

    Attributes:
        local_rank: this process among the ranks of its machine, which is also its GPU.
        address: of rank 0's machine; empty for a rank alone.
        elsewhere: some ranks run on other machines, as far as the launcher has said.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    address: str = ""
    port: int = 0
    elsewhere: bool = False


def read_rendezvous(environ: Mapping[str, str]) -> Rendezvous:
    """What `torchrun` and the `deepspeed` launcher tell each rank; a rank alone where they have said nothing.

    Raises:
        UserError: a variable is missing, or is not what it must be.
    """
    size = _count(environ, "WORLD_SIZE", 1)
    rank = _count(environ, "RANK", 0)
    if size < 1:
        raise UserError("WORLD_SIZE = 0: at least 1, the number of all ranks on all machines")
    if rank >= size:
        raise UserError(f"RANK = {rank} with WORLD_SIZE = {size}: ranks are 0 to {size - 1}")
    local_rank = _count(environ, "LOCAL_RANK", 0)
    if size == 1:
        return Rendezvous(local_rank=local_rank)
    missing = [name for name in MEETING if not environ.get(name)]
    if missing:
        raise UserError(
            f"WORLD_SIZE = {size} without {', '.join(missing)}: each rank needs {', '.join(MEETING)}, as torchrun and "
            "deepspeed set them"
        )
    # torchrun calls it LOCAL_WORLD_SIZE, deepspeed LOCAL_SIZE.
    here = _count(environ, "LOCAL_WORLD_SIZE", _count(environ, "LOCAL_SIZE", size))
    port = _count(environ, "MASTER_PORT", 0)
    if not 0 < port < 65536:
        raise UserError(f"MASTER_PORT = {port}: a port is 1 to 65535")
    return Rendezvous(rank, size, local_rank, environ["MASTER_ADDR"], port, here < size)


def card_towards(rendezvous: Rendezvous) -> str | None:
    """Name of the network card by which this machine reaches the rendezvous address; None where it cannot be told.

    gloo itself would take the card that the machine's own name stands for, which often is the loopback.

    Raises:
        UserError: it is the loopback, while ranks run on other machines.
    """
    own = _own_address(rendezvous.address, rendezvous.port)
    if own is None:
        return None
    if rendezvous.elsewhere and is_loopback(own):
        raise UserError(
            f"MASTER_ADDR = {rendezvous.address!r} is {own} on this machine, where no other machine comes: give the "
            "address by which the others reach rank 0 (deepspeed --master_addr), or name the network card in "
            "GLOO_SOCKET_IFNAME"
        )
    for name, addresses in psutil.net_if_addrs().items():
        if any(found.address.partition("%")[0] == own.partition("%")[0] for found in addresses):
            return name
    return None


def _own_address(host: str, port: int) -> str | None:
    """The address this machine would use towards another one; connecting a datagram socket sends nothing."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError:
        # The name may stand for nothing yet, where machines start together.
        return None


def _count(environ: Mapping[str, str], name: str, default: int) -> int:
    given = environ.get(name, "").strip()
    if not given:
        return default
    if not given.isdecimal():
        raise UserError(f"{name} = {given!r}: a whole number from 0 up")
    return int(given)
