"""Where the learner's ranks meet: what a launcher sets in the environment, and the network interface they use."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass

import psutil  # comes with DeepSpeed

from common.errors import UserError
from common.network import is_loopback

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """This process among the ranks, and where rank 0 waits for the others.

    Attributes:
        local_rank: this process among the ranks of its machine, which is also its GPU.
        master_addr: of rank 0's machine; empty for a single rank.
        multi_node: some ranks run on other machines, as far as the launcher says.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    master_addr: str = ""
    master_port: int = 0
    multi_node: bool = False


def read_rendezvous(environ: Mapping[str, str]) -> Rendezvous:
    """What `torchrun` and the `deepspeed` launcher set for each rank; a single rank where they have set nothing.

    Raises:
        UserError: a variable is missing or invalid.
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
    missing = [name for name in VARIABLES if not environ.get(name)]
    if missing:
        raise UserError(
            f"WORLD_SIZE = {size} without {', '.join(missing)}: each rank needs {', '.join(VARIABLES)}, as "
            "torchrun and deepspeed set them"
        )
    # torchrun calls it LOCAL_WORLD_SIZE, deepspeed LOCAL_SIZE.
    local_size = _count(environ, "LOCAL_WORLD_SIZE", _count(environ, "LOCAL_SIZE", size))
    port = _count(environ, "MASTER_PORT", 0)
    if not 0 < port < 65536:
        raise UserError(f"MASTER_PORT = {port}: a port is 1 to 65535")
    return Rendezvous(rank, size, local_rank, environ["MASTER_ADDR"], port, local_size < size)


def network_interface_towards(rendezvous: Rendezvous) -> str | None:
    """Name of the interface through which this machine reaches the master address; None where that is unknown.

    gloo itself would take the interface of the machine's own host name, which often is the loopback.

    Raises:
        UserError: it is the loopback, while ranks run on other machines.
    """
    own = _own_address(rendezvous.master_addr, rendezvous.master_port)
    if own is None:
        return None
    if rendezvous.multi_node and is_loopback(own):
        raise UserError(
            f"MASTER_ADDR = {rendezvous.master_addr!r} is {own} on this machine, which no other machine can reach: "
            "give the address by which the others reach rank 0 (deepspeed --master_addr), or name the interface in "
            "GLOO_SOCKET_IFNAME"
        )
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.partition("%")[0] == own.partition("%")[0] for address in addresses):
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
        # The host name may not resolve yet, where machines start together.
        return None


def _count(environ: Mapping[str, str], name: str, default: int) -> int:
    value = environ.get(name, "").strip()
    if not value:
        return default
    if not value.isdecimal():
        raise UserError(f"{name} = {value!r}: a whole number from 0 up")
    return int(value)
