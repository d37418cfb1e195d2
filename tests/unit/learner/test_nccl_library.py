"""How libnccl is called: against a library with the same calls, over host memory, for threads instead of GPUs."""

from __future__ import annotations

import contextlib
import inspect
import queue
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from common.config import WeightsConfig
from common.errors import UserError
from learner import nccl
from learner.nccl import FLOAT32, SUM, UINT8, Nccl, NcclError
from learner.weight_server import WeightServer

needs_compiler = pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler")


@pytest.fixture(scope="module")
def fake_nccl(tmp_path_factory: pytest.TempPathFactory) -> Nccl:
    made = tmp_path_factory.mktemp("nccl") / "libnccl.so.2"
    source = Path(__file__).with_name("fake_nccl.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-pthread", "-o", str(made), str(source)], check=True)
    return Nccl(torch.device("cpu"), str(made))


class Event:
    """On a CPU everything has happened as soon as it returns."""

    def record(self, stream: object) -> None:
        pass

    def query(self) -> bool:
        return True


@pytest.fixture
def cuda_on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams that do nothing; "the GPU" is host memory."""
    stream = SimpleNamespace(cuda_stream=0, synchronize=lambda: None)
    for name, value in {
        "Stream": lambda device, priority: stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "Event": Event,
        "set_device": lambda device: None,
    }.items():
        monkeypatch.setattr(nccl.torch.cuda, name, value)


@needs_compiler
@pytest.mark.integration
@pytest.mark.usefixtures("cuda_on_host")
def test_rank_0_meets_the_others_and_what_it_broadcasts_arrives(fake_nccl: Nccl) -> None:
    unique_id = fake_nccl.unique_id()
    assert len(unique_id) == 128
    pieces = [torch.arange(size, dtype=torch.uint8) for size in (69, 200, 6)]
    staging = torch.zeros(200, dtype=torch.uint8)

    def worker(rank: int) -> list[torch.Tensor]:
        """As vLLM's side: join, sum one element, receive."""
        handle = fake_nccl.init_rank(unique_id, 3, rank)
        one = torch.ones(1)
        fake_nccl.call("ncclAllReduce", one.data_ptr(), one.data_ptr(), 1, FLOAT32, SUM, handle, 0)
        received = []
        for piece in pieces:
            buffer = torch.zeros(len(piece), dtype=torch.uint8)
            fake_nccl.call("ncclBroadcast", buffer.data_ptr(), buffer.data_ptr(), len(buffer), UINT8, 0, handle, 0)
            received.append(buffer)
        fake_nccl.call("ncclCommAbort", handle)
        return received

    with ThreadPoolExecutor(2) as threads:
        members = [threads.submit(worker, rank) for rank in (1, 2)]
        communicator = fake_nccl.join(unique_id, 3)
        for piece in pieces:
            communicator.broadcast(piece, staging, lambda: True)
        for member in members:
            for piece, buffer in zip(pieces, member.result(30), strict=True):
                assert torch.equal(buffer, piece)
    communicator.abort()
    communicator.abort()
    with pytest.raises(NcclError, match="dissolved"):
        communicator.broadcast(pieces[0], staging, lambda: True)


@needs_compiler
def test_groups_that_live_have_streams_of_their_own_and_those_of_groups_that_have_ended_are_used_again(
    fake_nccl: Nccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    def stream(device: torch.device, priority: int) -> SimpleNamespace:
        inspect.signature(torch_stream.__new__).bind(torch_stream, device, priority=priority)
        made.append(priority)
        return SimpleNamespace(cuda_stream=0, synchronize=lambda: None)

    torch_stream = torch.cuda.Stream
    for name, value in {
        "Stream": stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "set_device": lambda device: None,
    }.items():
        monkeypatch.setattr(nccl.torch.cuda, name, value)
    monkeypatch.setattr(fake_nccl, "call", lambda name, *arguments: None)
    fake_nccl._streams = queue.SimpleQueue()  # of no test before
    living = fake_nccl.join(bytes(128), 2)
    streams = set()
    for _ in range(40):  # torch has 32 of a priority
        group = fake_nccl.join(bytes(128), 2)
        streams.add(id(group._stream))
        assert group._stream is not living._stream
        group.abort()
    assert len(streams) == 1
    assert len(made) == 2
    assert max(made) < -1  # those of training have 0, and the copies of weights -1
    living.abort()


@needs_compiler
def test_a_refusal_by_nccl_is_reported_with_its_message(fake_nccl: Nccl) -> None:
    with pytest.raises(NcclError, match="ncclCommInitRank: invalid usage"):
        fake_nccl.init_rank(fake_nccl.unique_id(), 2, 5)


def test_a_library_that_is_not_there_is_named() -> None:
    with pytest.raises(NcclError, match=r"no NCCL library: .*libnowhere\.so"):
        Nccl(torch.device("cpu"), "libnowhere.so")


def test_the_backend_without_a_gpu_is_refused_with_the_other() -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU is there")
    with pytest.raises(UserError, match="learner.weights.backend = 'nccl' needs a GPU.*; set it to zmq"):
        WeightServer(WeightsConfig(backend="nccl"))
