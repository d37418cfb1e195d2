"""Shared memory that is handed to other processes through a Unix socket; here both sides are in one thread."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.config import WeightsConfig
from common.weights.handover import GONE, HERE, REFUSED, Handover, boot_id, connect, shared_folder
from common.weights.memory import MemoryFile, Snapshot
from common.weights.wire import Manifest, checksum

DATA = bytes(range(256)) * 16


def snapshot(name: str = "ab-1", *, arriving: bool = False) -> Snapshot:
    """A snapshot of one tensor in two chunks, in a memory file."""
    file, half = MemoryFile(len(DATA)), len(DATA) // 2
    manifest = Manifest(
        snapshot=name, version=1, total_bytes=len(DATA), chunk_bytes=half,
        checksums=[checksum(DATA[:half]), checksum(DATA[half:])],
        names=["w"], dtypes=["uint8"], shapes=[[len(DATA)]], offsets=[0],
    )  # fmt: skip
    if arriving:
        return Snapshot.arriving(manifest, file)
    file.write(0, DATA)
    return Snapshot.whole(manifest, file)


class Serving:
    """A `Handover` with some snapshots, and clients of it."""

    def __init__(self, folder: Path) -> None:
        self.handover = Handover(folder)
        self.path = folder / self.handover.name
        self.snapshots: dict[str, Snapshot] = {}
        self._clients: list[socket.socket] = []

    def ask(self, request: bytes) -> socket.socket:
        client = connect(self.path)
        client.settimeout(60)
        client.send(request)
        self._clients.append(client)
        self.turn()
        return client

    def ask_for(self, name: str) -> socket.socket:
        return self.ask(f"{self.handover.token} {name}".encode())

    def turn(self) -> None:
        for _ in range(3):  # to let somebody in, to hear it, and to answer
            self.handover.turn(self.snapshots.get)

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self.handover.close()


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    serving = Serving(tmp_path)
    yield serving
    serving.close()


def received(client: socket.socket, size: int = len(DATA)) -> MemoryFile:
    word, numbers, _, _ = socket.recv_fds(client, 100, 1)
    assert word == HERE
    return MemoryFile.received(numbers[0], size)


def test_what_is_handed_over_is_the_memory_itself(serving: Serving) -> None:
    source = serving.snapshots["ab-1"] = snapshot()
    file = received(serving.ask_for("ab-1"))
    assert bytes(file.view(0, len(DATA))) == DATA
    assert source.file is not None
    source.file.write(0, b"changed")
    assert bytes(file.view(0, 7)) == b"changed"
    # By its path other processes of this one's account open it; here, as the engine's processes do.
    assert Path(file.path).read_bytes()[:7] == b"changed"
    assert os.stat(file.path).st_ino == os.stat(source.file.path).st_ino


def test_memory_outlives_the_process_that_made_it_for_as_long_as_somebody_reads(serving: Serving) -> None:
    serving.snapshots["ab-1"] = snapshot()
    file = received(serving.ask_for("ab-1"))
    serving.snapshots.pop("ab-1").file.close()
    serving.handover.close()
    assert bytes(file.view(0, len(DATA))) == DATA
    serving.handover = Handover(serving.path.parent)


def test_a_reader_is_known_until_it_leaves(serving: Serving) -> None:
    serving.snapshots = {"ab-1": snapshot(), "ab-2": snapshot("ab-2")}
    client = serving.ask_for("ab-1")
    assert (serving.handover.holds("ab-1"), serving.handover.holds("ab-2")) == (True, False)
    client.close()
    serving.turn()
    assert not serving.handover.holds("ab-1")


def test_a_snapshot_that_still_arrives_is_handed_over_once_it_is_whole(serving: Serving) -> None:
    source = serving.snapshots["ab-1"] = snapshot(arriving=True)
    client = serving.ask_for("ab-1")
    client.setblocking(False)
    for index, piece in enumerate((DATA[: len(DATA) // 2], DATA[len(DATA) // 2 :])):
        with pytest.raises(BlockingIOError):
            client.recv(100)
        assert serving.handover.holds("ab-1")
        assert source.file is not None
        source.file.write(index * len(piece), piece)
        source.chunks[index] = source.file.view(index * len(piece), (index + 1) * len(piece))
        serving.turn()
    assert bytes(received(client).view(0, len(DATA))) == DATA


def test_who_waits_for_a_snapshot_that_never_becomes_whole_is_told_so(serving: Serving) -> None:
    serving.snapshots["ab-1"] = snapshot(arriving=True)
    client = serving.ask_for("ab-1")
    del serving.snapshots["ab-1"]
    serving.turn()
    assert client.recv(100) == GONE


def test_only_who_knows_the_token_is_given_memory(serving: Serving) -> None:
    serving.snapshots["ab-1"] = snapshot()
    for request in (b"ab-1", b" ab-1", b"0" * 64 + b" ab-1", serving.handover.token[:-1].encode() + b" ab-1"):
        assert serving.ask(request).recv(100) == REFUSED
    assert serving.ask_for("ab-9").recv(100) == GONE
    assert serving.ask_for("").recv(100) == REFUSED


def test_bytes_that_mean_nothing_stop_nobody(serving: Serving) -> None:
    serving.snapshots["ab-1"] = snapshot()
    randomness = random.Random(0)
    for size in (1, 3, 64, 65, 66, 255, 256, 4000):
        assert serving.ask(randomness.randbytes(size)).recv(100) == REFUSED
        assert serving.ask(serving.handover.token.encode() + b" " + randomness.randbytes(size)).recv(100) == GONE
    assert bytes(received(serving.ask_for("ab-1")).view(0, len(DATA))) == DATA


def test_what_killed_processes_left_is_removed_and_what_others_use_is_not(tmp_path: Path) -> None:
    killed, alive = Handover(tmp_path), Handover(tmp_path)
    killed._listener.close()  # what is left of a process that was killed: a name
    elsewhere = tmp_path / f"{'0' * 36}-{'0' * 16}.sock"
    elsewhere.touch()
    other = Handover(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {alive.name, other.name, elsewhere.name}
    for handover in (alive, other):
        handover.close()
    assert {path.name for path in tmp_path.iterdir()} == {elsewhere.name}


def test_a_folder_may_have_a_path_longer_than_a_sockets(tmp_path: Path) -> None:
    serving = Serving(tmp_path / ("long" * 20) / ("long" * 20))
    serving.snapshots["ab-1"] = snapshot()
    assert bytes(received(serving.ask_for("ab-1")).view(0, len(DATA))) == DATA
    serving.close()


def test_a_folder_that_can_hold_no_socket_is_an_error_of_the_system() -> None:
    with pytest.raises(OSError, match="proc"):
        Handover(Path("/proc/weights"))


def test_the_socket_and_a_folder_made_for_it_are_this_accounts_alone(tmp_path: Path) -> None:
    serving = Serving(tmp_path / "made")
    assert (tmp_path / "made").stat().st_mode & 0o777 == 0o700
    assert serving.path.stat().st_mode & 0o777 == 0o600
    serving.close()


def test_memory_is_of_the_size_that_readers_map(tmp_path: Path) -> None:
    file = MemoryFile(100)
    with pytest.raises(PermissionError):
        os.ftruncate(file.number, 50)
    with pytest.raises(ValueError, match="not the memory"):
        MemoryFile.received(os.dup(file.number), 101)
    unsealed = os.memfd_create("other", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 100)
    with pytest.raises(ValueError, match="not the memory"):
        MemoryFile.received(unsealed, 100)
    ordinary = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    with pytest.raises(OSError, match="Invalid argument"):
        MemoryFile.received(ordinary, 0)
    for number in (unsealed, ordinary):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(number)  # taken over, and closed


def test_the_folder_is_one_of_this_account_unless_another_is_given() -> None:
    assert shared_folder(WeightsConfig()) == Path(f"/dev/shm/spo-{os.geteuid()}")
    assert shared_folder(WeightsConfig(shared_folder="/weights")) == Path("/weights")
    assert shared_folder(WeightsConfig(shared_folder="off")) is None


def test_sockets_of_this_machine_begin_with_its_boot_id(serving: Serving) -> None:
    assert serving.handover.name.startswith(boot_id())
