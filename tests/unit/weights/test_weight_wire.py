"""The wire format and the snapshot: bytes are where the manifest says, and nothing else is accepted."""

from __future__ import annotations

import msgpack
import pytest
import torch

from common.messages import InvalidMessage
from common.weights.wire import (
    ALIGNMENT,
    Manifest,
    checksum,
    supersedes,
    unpack_reply,
    unpack_request,
)
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
    other = copy_weights(
        1, random_weights(seed=4, chunks=9).items(), torch.float32, CHUNK, memory=grown.memory
    ).snapshot()
    again = copy_weights(2, iter(weights.items()), torch.float32, CHUNK, memory=other.memory).snapshot()
    assert again.memory is other.memory
    assert again.manifest.checksums == snapshot(3, chunks=9).manifest.checksums


@pytest.mark.parametrize(
    ("offered", "have", "newer"),
    [
        ("ab-0", "", True),
        ("ab-10", "ab-9", True),
        ("ab-9", "ab-10", False),
        ("cd-0", "ab-9", True),
    ],
)
def test_a_snapshot_supersedes_older_ones(offered: str, have: str, newer: bool) -> None:
    assert supersedes(offered, have) == newer
