"""The ranks that a launcher's variables describe, the interface over which they talk, their memory and their end."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from common.errors import UserError
from learner.ranks import world
from learner.ranks.heap import Heap, resident
from learner.ranks.rank import Rendezvous, network_interface_towards, read_rendezvous
from tests.support.ports import free_port

ROOT = Path(__file__).parents[3]
TWO = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node-0", "MASTER_PORT": "29500"}
LOCAL_SIZES = {"torchrun, machines": "LOCAL_WORLD_SIZE", "deepspeed, machines": "LOCAL_SIZE"}
STARTS = {
    "nothing": ({}, Rendezvous()),
    "torchrun": (TWO | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, Rendezvous(1, 2, 1, "node-0", 29500)),
} | {
    name: (TWO | {"LOCAL_RANK": "0", size: "1"}, Rendezvous(1, 2, 0, "node-0", 29500, multi_node=True))
    for name, size in LOCAL_SIZES.items()
}


@pytest.mark.parametrize("start", STARTS)
def test_torchrun_deepspeed_and_plain_starts_are_understood(start):
    variables, expected = STARTS[start]
    assert read_rendezvous(variables) == expected


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (TWO | {"RANK": "-1"}, "RANK = '-1': must be a whole number"),
        (TWO | {"RANK": "2"}, "RANK = 2 with WORLD_SIZE = 2: ranks are 0 to 1"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE = 0: must be at least 1"),
        ({"RANK": "0", "WORLD_SIZE": "4"}, "WORLD_SIZE = 4 without MASTER_ADDR, MASTER_PORT"),
        (TWO | {"MASTER_PORT": "70000"}, "MASTER_PORT = 70000: must be a port"),
    ],
)
def test_an_environment_with_invalid_ranks_is_refused_by_name(environ, message):
    with pytest.raises(UserError, match=message):
        read_rendezvous(environ)


def test_ranks_talk_over_the_interface_that_others_can_reach(monkeypatch):
    own = [name for name, addresses in psutil.net_if_addrs().items() if "127.0.0.1" in {a.address for a in addresses}]
    assert network_interface_towards(Rendezvous(0, 2, 0, "127.0.0.1", 29500)) in own
    refusal = r"MASTER_ADDR = '127\.0\.1\.1'.*no other machine can reach.*GLOO_SOCKET_IFNAME"
    with pytest.raises(UserError, match=refusal):
        network_interface_towards(Rendezvous(0, 2, 0, "127.0.1.1", 29500, multi_node=True))

    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert network_interface_towards(Rendezvous(1, 2, 0, "learner-0.learner", 29500)) is None, "gloo chooses"


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[/gloo/transport/tcp/pair.cc:538] Connection closed by peer [10.203.0.3]:51162"), True),
        (world.RendezvousError("rank 0 of 2 did not meet the others"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)"), False),
    ],
)
def test_a_lost_rank_is_told_from_other_failures(error, lost):
    line = world.lost_rank_message(error)
    assert (line is not None) == lost
    assert not lost or str(error) in (line or "")


def run(program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own: it ends, and shares no process group with other tests."""
    command, environment = [sys.executable, "-c", program], {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


START_ALONE = """
import datetime, functools
from learner.ranks import world
world.dist.init_process_group = functools.partial(
    world.dist.init_process_group, timeout=datetime.timedelta(seconds=1)
)
try:
    world.start()
except world.RendezvousError as error:
    assert world.lost_rank_message(error) == str(error)
    print(error)
"""


@pytest.mark.integration
def test_ranks_that_do_not_come_may_come_another_time():
    port = str(free_port())
    rank = TWO | {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ended = run(START_ALONE, **rank, GLOO_SOCKET_IFNAME="lo")
    assert ended.returncode == 0, ended.stderr
    assert f"rank 0 of 2 did not meet the others at 127.0.0.1:{port} (over lo)" in ended.stdout


ENDS = """
import atexit, sys
from learner.ranks.rank import exits_at_once

class Late:
    def __del__(self):
        print("torn down")

late = Late()
atexit.register(print, "said goodbye")

def work():
    print("worked", end=" ")
    {end}

exits_at_once(work)()
"""


@pytest.mark.integration
@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        ("sys.exit(2)", 2, ""),
        ("sys.exit('no room')", 1, "no room"),
        ("raise RuntimeError('broken')", 1, "RuntimeError: broken"),
    ],
)
def test_a_rank_ends_with_its_code_and_tears_nothing_down(end, code, words):
    ended = run(ENDS.replace("{end}", end))
    assert (ended.returncode, ended.stdout) == (code, "worked said goodbye\n")
    assert words in ended.stderr
    assert bool(ended.stderr) == bool(words)


BLOCK, BLOCKS = 100_000, 2000  # bytes that the C library takes from its heap


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc")
def test_holes_in_the_heap_are_given_back():
    library = ctypes.CDLL(None)
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    Heap().give_back()
    before = resident()
    blocks = [library.malloc(BLOCK) for _ in range(BLOCKS)]
    for block in blocks:
        ctypes.memset(block, 1, BLOCK)
    assert resident() - before > 0.9 * BLOCK * BLOCKS
    for block in blocks[:-1]:  # the last one keeps the heap's end where it is
        library.free(block)
    assert resident() - before > 0.9 * BLOCK * BLOCKS
    Heap().give_back()
    assert resident() - before < 0.1 * BLOCK * BLOCKS
    library.free(blocks[-1])
