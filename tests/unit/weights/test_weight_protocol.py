"""Weights on their way: the wire format, deltas, the choice of a server, and memory that is handed over by a socket."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import socket
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from common.config import WeightsConfig
from common.messages import InvalidMessage
from common.weights import follow
from common.weights.delta import WrongDelta, decode, encode, encode_all, item_bytes
from common.weights.follow import AVOID, AVOID_MOST, Sources, WeightSource
from common.weights.handover import (
    GONE,
    HERE,
    MOST_SILENT,
    REFUSED,
    Handover,
    NotHandedOver,
    boot_id,
    connect,
    shared_folder,
    take,
)
from common.weights.memory import MemoryFile, Snapshot
from common.weights.wire import ALIGNMENT, Manifest, checksum, supersedes, unpack_reply, unpack_request
from learner.publish.weight_copy import copy_weights
from tests.support.weights import CHUNK, random_weights, snapshot


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgpack.packb({"v": 1, "kind": "manifest"}),
        msgpack.packb({"v": 2, "kind": "poll", "have": "a-b"}),
        msgpack.packb({"v": 2, "kind": "poll", "have": "a" * 100 + "-1"}),
        msgpack.packb({"v": 2, "kind": "fetch", "snapshot": "a", "chunk": -1}),
        msgpack.packb({"v": 2, "kind": "poll", "have": "", "more": 1}),
    ],
)
def test_other_bytes_are_no_request(data: bytes) -> None:
    with pytest.raises(InvalidMessage):
        unpack_request(data)


@pytest.mark.parametrize(
    "wrong",
    [
        {"checksums": [1]},
        {"names": ["embed"]},
        {"offsets": [0, 8, 16, 24, 32]},
        {"dtypes": ["float32"] * 4 + ["object"]},
        {"shapes": [[10**9], [7], [], [0, 3], [333, 33]]},
        {"total_bytes": 5_000_000},
    ],
)
def test_a_manifest_that_does_not_describe_its_bytes_is_refused(wrong: dict[str, object]) -> None:
    manifest = Manifest.model_construct(**(snapshot(3).manifest.model_dump() | wrong))
    with pytest.raises(InvalidMessage):
        unpack_reply(manifest.pack())


def test_a_manifest_with_a_flipped_bit_is_refused() -> None:
    manifest = snapshot(3).manifest.model_copy(update={"base": "ab-2", "check_token_ids": [7], "version": 259})
    packed = manifest.pack()
    assert unpack_reply(packed).version == 259
    for bit in range(0, 8 * len(packed), 13):
        flipped = bytearray(packed)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(InvalidMessage):
            unpack_reply(bytes(flipped))


def test_a_snapshot_holds_tensors_where_its_manifest_says() -> None:
    weights = random_weights(seed=1) | {"ids": torch.arange(3)}
    taken = copy_weights(0, weights.items(), torch.bfloat16, CHUNK).snapshot()
    manifest, data = taken.manifest, bytearray(b"".join(taken.chunks))
    assert manifest.dtypes == ["bfloat16"] * 5 + ["int64"]
    for name, offset in zip(manifest.names, manifest.offsets, strict=True):
        expected = weights[name] if name == "ids" else weights[name].to(torch.bfloat16)
        stored = torch.frombuffer(data, dtype=torch.uint8)[offset : offset + expected.nbytes]
        assert offset % ALIGNMENT == 0
        assert torch.equal(stored.view(expected.dtype).view(expected.shape), expected), name
    assert manifest.checksums == [checksum(chunk) for chunk in taken.chunks]


def test_a_snapshot_may_overwrite_the_memory_of_another() -> None:
    weights = random_weights(seed=3, chunks=9)
    grown = copy_weights(0, iter(weights.items()), torch.float32, CHUNK).snapshot()
    second = random_weights(seed=4, chunks=9).items()
    other = copy_weights(1, second, torch.float32, CHUNK, memory=grown.memory).snapshot()
    again = copy_weights(2, iter(weights.items()), torch.float32, CHUNK, memory=other.memory).snapshot()
    assert again.memory is other.memory
    assert again.manifest.checksums == snapshot(3, chunks=9).manifest.checksums


NEWER = [("ab-0", "", True), ("ab-10", "ab-9", True), ("ab-9", "ab-10", False), ("cd-0", "ab-9", True)]


@pytest.mark.parametrize(("offered", "have", "newer"), NEWER)
def test_a_snapshot_supersedes_older_ones(offered: str, have: str, newer: bool) -> None:
    assert supersedes(offered, have) == newer


SIZE = 1 << 16
compressed = zstandard.ZstdCompressor().compress


@functools.cache
def versions(changed: float) -> tuple[bytes, bytes]:
    """Bfloat16 weights, and the same with a share of them moved to the next number."""
    rng = np.random.default_rng(0)
    weights = (torch.from_numpy(rng.standard_normal(SIZE).astype(np.float32)) * 0.02).bfloat16()
    numbers = weights.view(torch.int16).numpy().copy()
    base = numbers.tobytes()
    numbers[rng.random(SIZE) < changed] += 1
    return base, numbers.tobytes()


@given(st.binary(max_size=200), st.binary(max_size=200), st.sampled_from([1, 2, 4, 8]))
def test_any_change_comes_back(one: bytes, other: bytes, width: int) -> None:
    size = min(len(one), len(other))
    base, chunk = one[:size] * 20, other[:size] * 20
    delta = encode(chunk, base, width)
    if delta is not None:
        assert decode(delta, base, width) == chunk


@pytest.mark.parametrize(("changed", "times"), [(0.0, 1000), (0.003, 100), (0.03, 20)])
def test_a_delta_is_in_proportion_to_what_changed(changed: float, times: int) -> None:
    base, chunk = versions(changed)
    delta = encode(chunk, base, 2)
    assert delta is not None
    assert len(delta) * times < len(chunk)
    assert decode(delta, base, 2) == chunk


def test_other_weights_have_no_delta() -> None:
    base, _ = versions(0)
    other = np.random.default_rng(0).bytes(len(base))
    same, *none = encode_all([base, other, base, None], [base, base, None, base], 2)
    assert decode(same, base, 2) == base
    assert none == [None, None, None]


@pytest.mark.parametrize(
    "delta",
    [
        b"",
        compressed(bytes(SIZE)),  # of a smaller chunk
        compressed(bytes(1 << 30)),  # 33 KB that would be a gigabyte
        zstandard.ZstdCompressor(write_content_size=False).compress(bytes(2 * SIZE)),
        compressed(bytes(2 * SIZE))[:-3],
    ],
    ids=["empty", "smaller", "larger", "of unknown size", "cut short"],
)
def test_bytes_that_are_no_delta_of_the_chunk_are_refused(delta: bytes) -> None:
    base, _ = versions(0)
    with pytest.raises(WrongDelta):
        decode(delta, base, 2)


@given(st.data())
def test_a_damaged_delta_is_refused_or_keeps_the_size(data: st.DataObject) -> None:
    base, chunk = versions(0.01)
    delta = bytearray(encode(chunk, base, 2) or b"")
    delta[data.draw(st.integers(0, len(delta) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with contextlib.suppress(WrongDelta):
        assert len(decode(bytes(delta), base, 2)) == len(base)


def test_planes_are_those_of_most_of_the_snapshot() -> None:
    tensors = {"weights": torch.zeros(100, dtype=torch.bfloat16), "counts": torch.zeros(20, dtype=torch.int64)}
    assert item_bytes(copy_weights(0, tensors.items(), torch.bfloat16, CHUNK).snapshot().manifest) == 2
    assert item_bytes(snapshot(0).manifest) == 4
    assert item_bytes(copy_weights(0, [], torch.bfloat16, CHUNK).snapshot().manifest) == 1


LEARNER = {"address": "tcp://learner:1", "server_key": "key", "snapshot": "ab-7"}
NEAR = [{"name": "a", "address": "tcp://a:1"}, {"name": "b", "address": "tcp://b:1", "server_key": "key"}]
DIRECT = WeightSource("tcp://learner:1", "key")
A = WeightSource("tcp://a:1", relay="a")
B = WeightSource("tcp://b:1", "key", relay="b")
FAR = WeightSource("tcp://far:9", relay="tcp://far:9", configured=True)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(follow, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


@pytest.mark.parametrize(
    ("wanted", "learner", "failed", "chosen"),
    [
        ("auto", LEARNER, [], A),
        ("auto", LEARNER, [A], B),
        ("auto", LEARNER, [A, B], DIRECT),
        ("auto", None, [A, B], A),  # one that failed is better than none
        ("direct", LEARNER, [], DIRECT),
        ("direct", None, [], None),
        ("tcp://far:9", LEARNER, [], FAR),
        ("tcp://far:9", LEARNER, [FAR], DIRECT),
    ],
)
def test_relays_that_work_come_first_and_the_learner_last(
    clock: SimpleNamespace, wanted: str, learner: Any, failed: list[WeightSource], chosen: WeightSource | None
) -> None:
    sources = Sources(lambda: learner, wanted, lambda: NEAR)
    for source in failed:
        sources.failed(source)
    assert sources.choose() == chosen
    assert sources.newest == ("ab-7" if learner else "")


def test_each_failure_keeps_a_relay_out_twice_as_long(clock: SimpleNamespace) -> None:
    sources = Sources(lambda: LEARNER, "auto", lambda: NEAR)
    for failures in [*range(10), 0]:
        sources.failed(A)
        clock.now += min(AVOID_MOST, AVOID * 2**failures) - 1
        assert sources.choose() == B
        clock.now += 1
        assert sources.choose() == A
        if failures == 9:
            sources.worked(A)


DATA = bytes(range(256)) * 16


def whole_snapshot() -> Snapshot:
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
    snapshots, handover = {"ab-1": whole_snapshot()}, Handover(tmp_path / folder)

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


def test_clients_that_ask_for_nothing_are_bounded(tmp_path: Path) -> None:
    handover = Handover(tmp_path)
    with ExitStack() as stack:
        stack.callback(handover.close)
        reader, silent = stack.enter_context(connect(tmp_path / handover.name)), []
        _, numbers = answer(reader, f"{handover.token} ab-1".encode(), handover, {"ab-1": whole_snapshot()})
        os.close(*numbers)
        for _ in range(3 * MOST_SILENT):
            silent.append(stack.enter_context(connect(tmp_path / handover.name)))
            handover.turn(lambda _: None)
        assert handover.holds("ab-1"), "a reader stays"
        assert len(handover._clients) == MOST_SILENT + 1
        gone = silent[:-MOST_SILENT]
        assert [client.recv(1) for client in gone] == [b""] * len(gone)


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


def test_a_folder_that_cannot_be_looked_into_has_no_memory_of_this_machine(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 300)  # no name of a file is as long
    connection: Any = SimpleNamespace(handover=f"{'0' * 36}-{'0' * 16}.sock", token="t")
    with pytest.raises(NotHandedOver, match="from another machine"):
        take(folder, connection, whole_snapshot().manifest)


def test_only_sealed_memory_of_the_right_size_is_taken_over(tmp_path: Path) -> None:
    file = MemoryFile(100)
    with pytest.raises(PermissionError):
        os.ftruncate(file.number, 50)
    unsealed = os.memfd_create("other", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 100)
    ordinary = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    wrong = "not the memory"
    for number, size, words in ((os.dup(file.number), 101, wrong), (unsealed, 100, wrong), (ordinary, 0, "Invalid")):
        with pytest.raises((OSError, ValueError), match=words):
            MemoryFile.received(number, size)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(number)  # closed


def test_the_folder_is_this_accounts_by_default() -> None:
    assert shared_folder(WeightsConfig()) == Path(f"/dev/shm/spo-{os.geteuid()}")
    assert shared_folder(WeightsConfig(shared_folder="/weights")) == Path("/weights")
    assert shared_folder(WeightsConfig(shared_folder="off")) is None
