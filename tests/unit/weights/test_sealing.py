"""Encrypted chunks: what was encrypted for one place can be opened for that place alone, and unchanged."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from common.weights.sealing import TAG_BYTES, Seal, Sealer, WrongSeal
from common.weights.snapshot import Snapshot
from common.weights.wire import Chunk, Manifest, checksum

KEY = bytes(range(32))
DATA = np.random.default_rng(0).integers(0, 256, 10_000, np.uint8).data
HEADER = Chunk(snapshot="ab-1", chunk=7)


def sealed(header: Chunk = HEADER, data: memoryview = DATA, key: bytes = KEY) -> bytearray:
    target = bytearray(len(data) + TAG_BYTES)
    Seal(key).close(header, data, target)
    return target


def test_a_chunk_comes_back_as_it_was() -> None:
    for data in (DATA, DATA[:1], DATA[:0]):
        ciphertext = sealed(data=data)
        assert bytes(data) not in bytes(ciphertext) or not len(data) > 1
        assert Seal(KEY).open(HEADER, ciphertext) == data


def test_a_chunk_is_put_into_a_place_of_its_size_alone() -> None:
    memory = np.zeros(len(DATA) + 2, np.uint8)
    assert Seal(KEY).open(HEADER, sealed(), memory[1:-1].data) == DATA
    assert memory[1:-1].data == DATA
    assert (memory[0], memory[-1]) == (0, 0)
    for wrong in (memory, memory[2:-1], memory[:0]):
        with pytest.raises(WrongSeal):
            Seal(KEY).open(HEADER, sealed(), wrong.data)


@pytest.mark.parametrize(
    "header", [HEADER.model_copy(update=other) for other in ({"chunk": 8}, {"snapshot": "ab-2"}, {"delta": True})]
)
def test_a_chunk_cannot_be_passed_off_as_another(header: Chunk) -> None:
    with pytest.raises(WrongSeal):
        Seal(KEY).open(header, sealed())


def test_a_flipped_bit_anywhere_is_noticed() -> None:
    for place in (0, 1, 5000, 9999, 10_000, 10_015):
        ciphertext = sealed()
        ciphertext[place] ^= 1
        with pytest.raises(WrongSeal):
            Seal(KEY).open(HEADER, ciphertext)


def test_bytes_of_another_length_or_under_another_key_are_refused() -> None:
    for wrong in (b"", b"short", bytes(sealed()[:-1]), bytes(sealed()) + b"x", bytes(sealed(key=bytes(32)))):
        with pytest.raises(WrongSeal):
            Seal(KEY).open(HEADER, wrong)


def test_a_nonce_is_used_for_one_plaintext_alone() -> None:
    """The same bytes are encrypted differently in every place."""
    headers = [
        Chunk(snapshot="ab-1", chunk=chunk, delta=delta) for chunk in (0, 1, 2**31 - 1) for delta in (False, True)
    ]
    ciphertexts = {bytes(sealed(header)[:-TAG_BYTES]) for header in headers}
    assert len(ciphertexts) == len(headers)


def test_each_snapshot_has_a_key_of_its_own_wherever_it_is_served() -> None:
    manifest = Manifest(
        snapshot="ab-1", version=0, total_bytes=1, chunk_bytes=1, checksums=[checksum(b"x")],
        names=["w"], dtypes=["uint8"], shapes=[[1]], offsets=[0],
    )  # fmt: skip
    keys = {Snapshot.arriving(manifest).key for _ in range(3)}
    assert len(keys) == 3
    assert {len(key) for key in keys} == {32}


class Sent:
    """Of a message."""

    def __init__(self, done: bool) -> None:
        self.done = done


def test_memory_serves_again_only_after_what_it_held_was_sent() -> None:
    sealer, seal = Sealer(), Seal(KEY)

    def encrypt() -> np.ndarray:
        made, there = [], threading.Event()

        def done(ciphertext: np.ndarray) -> None:
            made.append(ciphertext)
            there.set()

        sealer.submit(seal, HEADER, DATA, done)
        assert there.wait(60)
        assert seal.open(HEADER, made[0].data) == DATA
        return made[0]

    first, still = encrypt(), Sent(False)
    sealer.sent(still, first)
    second = encrypt()
    assert second is not first
    still.done = True
    assert encrypt() is first
    sealer.close()
