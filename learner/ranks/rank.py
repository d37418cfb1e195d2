"""A rank as a process: where it meets the other ranks, and how it ends. Imports no torch."""

from __future__ import annotations

import atexit
import os
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn

import psutil  # comes with DeepSpeed

from common.errors import UserError
from common.network import is_loopback

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """This process among the ranks, and where rank 0 waits for the others.

    Attributes:
        local_rank: number of this process among the ranks of its machine, and of its GPU.
        master_addr: address of rank 0's machine; empty for a single rank.
        multi_node: some ranks run on other machines, as far as the launcher says.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    master_addr: str = ""
    master_port: int = 0
    multi_node: bool = False


def read_rendezvous(environ: Mapping[str, str]) -> Rendezvous:
    """Read the variables of `torchrun` or `deepspeed`; without any, a single rank. Raises `UserError` if invalid."""
    size = _count(environ, "WORLD_SIZE", 1)
    rank = _count(environ, "RANK", 0)
    if size < 1:
        raise UserError("WORLD_SIZE = 0: must be at least 1, the number of ranks on all machines")
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
        raise UserError(f"MASTER_PORT = {port}: must be a port, 1 to 65535")
    return Rendezvous(rank, size, local_rank, environ["MASTER_ADDR"], port, local_size < size)


def network_interface_towards(rendezvous: Rendezvous) -> str | None:
    """Name of the interface through which this machine reaches the master address; None if unknown.

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
    """This machine's address towards another one. Connecting a datagram socket sends nothing."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError:
        # The host name may not resolve yet if machines start together.
        return None


def _count(environ: Mapping[str, str], name: str, default: int) -> int:
    value = environ.get(name, "").strip()
    if not value:
        return default
    if not value.isdecimal():
        raise UserError(f"{name} = {value!r}: must be a whole number, 0 or more")
    return int(value)


def exits_at_once(entry: Callable[[], None]) -> Callable[[], NoReturn]:
    """Wrap a console entry point: the process ends without tearing the interpreter down.

    DeepSpeed keeps the process group, so its threads outlive `destroy_process_group`. If one of them frees a tensor
    during the teardown, it aborts the process ("terminate called without an active exception", exit code 134),
    although its work is done.
    """

    def main() -> NoReturn:
        code = 0
        try:
            entry()
        except SystemExit as end:
            code = _number(end.code)
        except BaseException:
            traceback.print_exc()
            code = 1
        try:
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)

    return main


def _number(code: object) -> int:
    """The exit code that `sys.exit` makes of its argument."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)  # noqa: T201
    return 1
