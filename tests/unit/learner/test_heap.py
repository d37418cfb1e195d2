"""Memory that is free inside the heap goes back to the system once the process has grown."""

from __future__ import annotations

import ctypes

import pytest

from learner.ranks.heap import Heap, resident

BLOCK = 100_000  # bytes: the C library takes it from its heap
BLOCKS = 2000


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc")
def test_holes_in_the_heap_are_given_back() -> None:
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
