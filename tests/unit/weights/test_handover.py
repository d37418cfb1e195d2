"""Shared memory that is handed to other processes through a Unix socket; here both sides are in one thread."""

from __future__ import annotations

import os
import random
import socket
from pathlib import Path
from typing import Any

import pytest

from common.config import WeightsConfig
from common.weights.handover import (
    GONE,
    HERE,
    REFUSED,
    Handover,
    boot_id,
    connect,
    shared_folder,
)
from common.weights.memory import MemoryFile, Snapshot
from common.weights.wire import Manifest, checksum

DATA = bytes(range(256)) * 16


def snapshot() -> Snapshot:
    file = MemoryFile(len(DATA))
    file.write(0, DATA)
    manifest = Manifest(
        snapshot="ab-1", version=1, total_bytes=len(DATA), chunk_bytes=len(DATA), checksums=[checksum(DATA)],
        names=["w"], dtypes=["uint8"], shapes=[[len(DATA)]], offsets=[0],
    )  # fmt: skip
    return Snapshot.whole(manifest, file)


def answer(client: socket.socket, request: bytes, handover: Handover, snapshots: dict[str, Snapshot]) -> Any:
    client.settimeout(60)
    client.send(request)
    for _ in range(3):  # to let the client in, to hear it, and to answer
        handover.turn(snapshots.get)
    return socket.recv_fds(client, 100, 1)[:2]


@pytest.mark.parametrize("folder", ["short", "long" * 20 + "/" + "long" * 20])  # a socket's path has 107 bytes at most
def test_memory_is_given_only_for_the_token_and_a_snapshot(folder: str, tmp_path: Path) -> None:
    snapshots, handover = {"ab-1": snapshot()}, Handover(tmp_path / folder)

    def ask(request: bytes) -> tuple[bytes, list[int]]:
        with connect(tmp_path / folder / handover.name) as client:
            return answer(client, request, handover, snapshots)

    token, noise = handover.token.encode(), random.Random(0).randbytes
    refused = [b"ab-1", b" ab-1", b"0" * 64 + b" ab-1", token[:-1] + b" ab-1", token + b" "]
    sizes = (1, 3, 64, 65, 66, 255, 256, 4000)
    for request in [*refused, *map(noise, sizes)]:
        assert ask(request) == (REFUSED, [])
    for name in (b"ab-9", *map(noise, sizes)):
        assert ask(token + b" " + name) == (GONE, [])
    word, numbers = ask(token + b" ab-1")
    assert (word, len(numbers)) == (HERE, 1)
    os.close(*numbers)
    handover.close()


def test_sockets_of_killed_processes_are_removed_and_others_stay(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    killed, alive = Handover(folder), Handover(folder)
    killed._listener.close()  # what is left of a process that was killed: a name
    elsewhere = folder / f"{'0' * 36}-{'0' * 16}.sock"
    elsewhere.touch()
    other = Handover(folder)
    assert {path.name for path in folder.iterdir()} == {alive.name, other.name, elsewhere.name}
    assert alive.name.startswith(boot_id())
    assert (folder.stat().st_mode & 0o777, (folder / alive.name).stat().st_mode & 0o777) == (0o700, 0o600)
    for handover in (alive, other):
        handover.close()
    assert {path.name for path in folder.iterdir()} == {elsewhere.name}


def test_only_sealed_memory_of_the_right_size_is_taken_over(tmp_path: Path) -> None:
    file = MemoryFile(100)
    with pytest.raises(PermissionError):
        os.ftruncate(file.number, 50)
    unsealed = os.memfd_create("other", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 100)
    ordinary = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    for number, size, words in (
        (os.dup(file.number), 101, "not the memory"),
        (unsealed, 100, "not the memory"),
        (ordinary, 0, "Invalid argument"),
    ):
        with pytest.raises((OSError, ValueError), match=words):
            MemoryFile.received(number, size)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(number)  # closed


def test_the_folder_is_this_accounts_by_default() -> None:
    assert shared_folder(WeightsConfig()) == Path(f"/dev/shm/spo-{os.geteuid()}")
    assert shared_folder(WeightsConfig(shared_folder="/weights")) == Path("/weights")
    assert shared_folder(WeightsConfig(shared_folder="off")) is None
