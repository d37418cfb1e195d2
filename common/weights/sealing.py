"""Chunks encrypted by AES-256-GCM, several at a time: what goes between machines under CURVE keys.

CURVE encrypts all that one connection carries in one thread, at a third of the rate of plain chunks. So only
requests, manifests and keys go over it. A server makes a random key for each snapshot that it serves, and tells it to
clients over their CURVE connection; chunks are encrypted under it, and go over a socket of their own.

Under one key a nonce stands for one plaintext: it is made of the chunk's index and of whether the chunk goes as a
delta, and both are fixed for as long as the snapshot is served. Snapshot, index and kind are authenticated with the
chunk, so that none can be passed off as another.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from common.unpack import Buffer
from common.weights.delta import THREADS
from common.weights.wire import Chunk

KEY_BYTES = 32
TAG_BYTES = 16


class WrongSeal(Exception):
    """What came is not what was encrypted for this place."""


class Seal:
    """Encrypts and decrypts the chunks of one snapshot, in any number of threads.

    Args:
        key: [32] bytes.
    """

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)

    def close(self, header: Chunk, data: Buffer, target: Buffer) -> None:
        """Encrypt a chunk of N bytes, or its delta, into `target` [N + 16]."""
        self._cipher.encrypt_into(_nonce(header), data, _authenticated(header), target)

    def open(self, header: Chunk, data: Buffer, place: memoryview | None = None) -> memoryview:
        """The chunk, or its delta, that `close` was given with an equal header.

        Args:
            place: where to put it; None: in fresh memory, which takes longer. After `WrongSeal` it may hold anything.

        Raises:
            WrongSeal: it was not given that, or the place has another size.
        """
        size = len(data) - TAG_BYTES
        if size < 0 or (place is not None and len(place) != size):
            raise WrongSeal
        opened = place if place is not None else np.empty(size, np.uint8).data
        try:
            self._cipher.decrypt_into(_nonce(header), data, _authenticated(header), opened)
        except InvalidTag:
            raise WrongSeal from None
        return opened


def _nonce(header: Chunk) -> bytes:
    return struct.pack(">IQ", header.delta, header.chunk)


def _authenticated(header: Chunk) -> bytes:
    return f"{header.snapshot} {header.chunk} {header.delta}".encode()


class Tracker(Protocol):
    """Of a message that ZeroMQ may still read."""

    @property
    def done(self) -> bool:
        """It no longer does."""
        ...


class Sealer:
    """Encrypts in threads, into memory that serves again once it is sent: fresh memory would halve the rate."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, "sealing")
        self._sent: deque[tuple[Tracker, np.ndarray]] = deque()

    def submit(self, seal: Seal, header: Chunk, data: memoryview, done: Callable[[np.ndarray], None]) -> None:
        """Encrypt; `done` gets the ciphertext, uint8 [N + 16], in a thread of the pool."""
        target = self._memory(len(data) + TAG_BYTES)

        def run() -> None:
            seal.close(header, data, target.data)
            done(target)

        self._pool.submit(run)

    def sent(self, tracker: Tracker, ciphertext: np.ndarray) -> None:
        """Ciphertext is on its way; its memory may serve again after that."""
        self._sent.append((tracker, ciphertext))

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(cancel_futures=True)

    def _memory(self, size: int) -> np.ndarray:
        while self._sent and self._sent[0][0].done:
            _, memory = self._sent.popleft()
            if len(memory) == size:
                return memory
        return np.empty(size, np.uint8)
