"""The calls of CUDA by copies of weights, on a double: streams, pinned memory, and the GPU that a thread waits on."""

from __future__ import annotations

import gc
import inspect
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from learner.publish import host_copy
from learner.publish.host_copy import HostCopy, HostMemory
from learner.publish.weight_copy import copy_weights
from tests.support.weights import random_weights

SECOND_GPU = torch.device("cuda", 1)


class Cuda:
    """Records calls of `torch.cuda`, in order; memory can be pinned unless `refuses`."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.refuses = False

    def stream(self, *arguments: Any, **options: Any) -> Cuda:
        inspect.signature(torch.cuda.Stream.__new__).bind(torch.cuda.Stream, *arguments, **options)
        self.calls.append(("stream", *arguments))
        return self

    def event(self, **options: Any) -> Cuda:
        inspect.signature(torch.cuda.Event.__new__).bind(torch.cuda.Event, **options)
        self.calls.append(("event", options))
        return self

    def record(self, stream: Cuda) -> None:
        assert stream is self

    def synchronize(self) -> None:
        self.calls.append(("wait",))

    def device(self, device: torch.device | int) -> Cuda:
        self.calls.append(("on", device))
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.calls.append(("off",))

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.calls.append(("pin", size))
        return 712 if self.refuses else 0

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unpin",))
        return 0


@pytest.fixture
def cuda(monkeypatch):
    double = Cuda()
    for name, value in {
        "Stream": double.stream,
        "Event": double.event,
        "device": double.device,
        "current_device": lambda: 1,
        "is_available": lambda: True,
        "cudart": lambda: double,
    }.items():
        monkeypatch.setattr(host_copy.torch.cuda, name, value)
    host_copy._stream.cache_clear()
    yield double
    host_copy._stream.cache_clear()


def test_all_copies_share_one_stream(cuda):
    for _ in range(40):
        assert HostCopy(SECOND_GPU).is_beside
    assert cuda.calls == [("stream", SECOND_GPU)]


def test_a_thread_waits_on_the_gpu_that_copies(cuda):
    copy = HostCopy(SECOND_GPU)
    cuda.calls.clear()
    copied = copy.mark()
    assert cuda.calls == [("event", {"blocking": True})]  # a thread that waits takes no core
    cuda.calls.clear()
    thread = threading.Thread(target=copied)
    thread.start()
    thread.join()
    assert cuda.calls == [("on", SECOND_GPU), ("wait",), ("off",)]


def test_weights_change_after_their_copy_without_a_thread_that_waits(cuda, monkeypatch):
    copy = HostCopy(SECOND_GPU)
    training = SimpleNamespace(wait_stream=lambda stream: cuda.calls.append(("waits for", stream)))
    monkeypatch.setattr(host_copy.torch.cuda, "current_stream", lambda: training)
    cuda.calls.clear()
    copy.before_update()
    assert cuda.calls == [("waits for", cuda)]


def test_memory_is_pinned_while_it_is_there(cuda):
    memory = HostMemory(4096)
    assert cuda.calls == [("pin", 4096)]
    del memory
    gc.collect()
    assert cuda.calls == [("pin", 4096), ("on", 1), ("unpin",), ("off",)]


def test_memory_that_cannot_be_pinned_leaves_no_error_behind(cuda, monkeypatch):
    cuda.refuses = True

    def kernel(*_: Any, **options: Any) -> None:
        """Torch blames the first kernel that the thread starts afterwards."""
        cuda.calls.append(("kernel", options["device"]))
        raise RuntimeError("CUDA error: part or all of the requested memory range is already mapped")

    with monkeypatch.context() as patch:
        patch.setattr(host_copy.torch, "ones", kernel)
        memory = HostMemory(4096)
    memory.data.fill_(1)
    del memory
    gc.collect()
    assert cuda.calls == [("pin", 4096), ("kernel", "cuda")]


def test_memory_that_grows_beyond_what_is_needed_is_not_pinned(cuda):
    weights = random_weights(seed=1, chunks=20)
    weights["large"] = torch.zeros(1 << 20)  # more than the first guess
    snapshot = copy_weights(0, weights.items(), torch.float32, 1 << 20).snapshot()
    assert snapshot.memory.file.size > snapshot.manifest.total_bytes
    assert cuda.calls == []
