"""The wire format and the snapshot: what is described is what is there, and nothing else is accepted."""

from __future__ import annotations

import msgpack
import pytest
import torch

from common.messages import InvalidMessage
from common.weights.wire import (
    ALIGNMENT,
    Fetch,
    Hello,
    Manifest,
    Poll,
    checksum,
    supersedes,
    unpack_reply,
    unpack_request,
)
from learner.weight_copy import take_snapshot
from tests.support.weights import CHUNK, random_weights, snapshot


def test_a_manifest_survives_the_wire() -> None:
    manifest = snapshot(3, seed=0).manifest
    assert unpack_reply(manifest.pack()) == manifest


@pytest.mark.parametrize("request_", [Poll(have="ab-3"), Fetch(snapshot="ab-3", chunk=7), Hello()])
def test_requests_survive_the_wire(request_: Poll | Fetch | Hello) -> None:
    assert unpack_request(request_.pack()) == request_


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgpack.packb([1, 2]),
        msgpack.packb({"v": 1, "kind": "manifest"}),
        msgpack.packb({"v": 2, "kind": "poll", "have": ""}),
        msgpack.packb({"v": 1, "kind": "poll", "have": "a"}),
        msgpack.packb({"v": 1, "kind": "poll", "have": "a-b"}),
        msgpack.packb({"v": 1, "kind": "fetch", "snapshot": "a", "chunk": -1}),
        msgpack.packb({"v": 1, "kind": "fetch", "snapshot": "a", "chunk": "1"}),
        msgpack.packb({"v": 1, "kind": "poll", "have": "", "more": 1}),
    ],
)
def test_what_is_no_request_is_an_invalid_message(data: bytes) -> None:
    with pytest.raises(InvalidMessage):
        unpack_request(data)


@pytest.mark.parametrize(
    "wrong",
    [
        {"checksums": [1]},
        {"names": ["embed"]},
        {"offsets": [0, 0, 0, 0, 0]},
        {"offsets": [0, 8, 16, 24, 32]},
        {"dtypes": ["float32"] * 4 + ["object"]},
        {"shapes": [[10**9], [7], [], [0, 3], [333, 33]]},
        {"shapes": [[-1], [7], [], [0, 3], [333, 33]]},
        {"total_bytes": 5_000_000},
    ],
)
def test_a_manifest_that_does_not_describe_its_bytes_is_refused(wrong: dict[str, object]) -> None:
    tree = snapshot(3, seed=0).manifest.model_dump() | wrong
    with pytest.raises(InvalidMessage):
        unpack_reply(msgpack.packb(tree))


def test_a_snapshot_holds_each_tensor_where_its_manifest_says() -> None:
    weights = random_weights(seed=1)
    taken = take_snapshot(0, weights.items(), torch.bfloat16, CHUNK)
    manifest, data = taken.manifest, bytearray(b"".join(taken.chunks))
    for name, offset in zip(manifest.names, manifest.offsets, strict=True):
        expected = weights[name].to(torch.bfloat16)
        stored = torch.frombuffer(data, dtype=torch.uint8)[offset : offset + expected.nbytes]
        assert offset % ALIGNMENT == 0
        assert torch.equal(stored.view(torch.bfloat16).view(expected.shape), expected), name
    assert manifest.checksums == [checksum(chunk) for chunk in taken.chunks]


def test_only_floating_point_tensors_are_cast() -> None:
    taken = take_snapshot(0, [("w", torch.ones(2)), ("ids", torch.arange(3))], torch.bfloat16, CHUNK)
    assert taken.manifest.dtypes == ["bfloat16", "int64"]


def test_a_snapshot_keeps_its_values_when_the_model_moves_on() -> None:
    weights = random_weights(seed=2)
    taken = take_snapshot(0, weights.items(), torch.float32, CHUNK)
    before = b"".join(taken.chunks)
    for tensor in weights.values():
        tensor.add_(1)
    assert b"".join(taken.chunks) == before


def test_a_snapshot_may_overwrite_the_memory_of_another() -> None:
    weights = random_weights(seed=3, mib=9)
    grown = take_snapshot(0, iter(weights.items()), torch.float32, CHUNK)
    other = take_snapshot(1, random_weights(seed=4, mib=9).items(), torch.float32, CHUNK, memory=grown.memory)
    again = take_snapshot(2, iter(weights.items()), torch.float32, CHUNK, memory=other.memory)
    assert again.memory is other.memory
    assert again.manifest.checksums == take_snapshot(3, weights.items(), torch.float32, CHUNK).manifest.checksums


def test_two_snapshots_of_one_version_have_different_names() -> None:
    assert snapshot(5, seed=0).manifest.snapshot != snapshot(5, seed=0).manifest.snapshot


@pytest.mark.parametrize(
    ("offered", "have", "newer"),
    [
        ("ab-0", "", True),
        ("ab-1", "ab-0", True),
        ("ab-10", "ab-9", True),
        ("ab-0", "ab-0", False),
        ("ab-9", "ab-10", False),
        ("cd-0", "ab-9", True),
    ],
)
def test_a_snapshot_supersedes_older_ones_of_its_life_and_those_of_all_others(
    offered: str, have: str, newer: bool
) -> None:
    assert supersedes(offered, have) == newer


def test_chunks_cover_the_snapshot_without_overlap() -> None:
    manifest = Manifest(
        snapshot="a-0", version=0, total_bytes=25, chunk_bytes=10, checksums=[1, 2, 3],
        names=[], dtypes=[], shapes=[], offsets=[],
    )  # fmt: skip
    assert [manifest.chunk_range(i) for i in range(3)] == [(0, 10), (10, 20), (20, 25)]
