"""Groups of the backend `nccl`, with communicators that a test holds up: nobody waits for a generator that has died."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common.weights.delivery import SentStats
from common.weights.wire import Dissolved, Group, Join, Receive, Sending
from learner import nccl_groups, staging
from learner.nccl import NcclError
from learner.nccl_groups import NcclGroups
from learner.weight_copy import take_snapshot
from tests.support.weights import PATIENCE, eventually, random_weights

PIECE = 1000
SHORT = 0.5  # seconds of silence after which a generator counts as dead


class Communicator:
    """Keeps what it is to send; one that hangs sends nothing, and its abort returns when the test says so."""

    def __init__(self, hangs: bool) -> None:
        self.hangs = hangs
        self.sent = b""
        self.buffers: set[int] = set()
        self.is_sending, self.may_abort, self.aborted = threading.Event(), threading.Event(), threading.Event()

    def broadcast(self, piece: torch.Tensor, buffer: torch.Tensor, alive: Callable[[], bool]) -> None:
        self.is_sending.set()
        self.buffers.add(buffer.data_ptr())
        buffer[: len(piece)].copy_(piece)
        while self.hangs:
            if not alive():
                raise NcclError("the generator does not receive")
        self.sent += buffer[: len(piece)].numpy().tobytes()

    def abort(self) -> None:
        if self.hangs:
            self.may_abort.wait(60)
        self.aborted.set()


class Nccl:
    """Groups that are complete at once; the first ones hang."""

    device = torch.device("cpu")

    def __init__(self, hanging: int) -> None:
        self.communicators: dict[bytes, Communicator] = {}
        self._hanging = hanging

    def unique_id(self) -> bytes:
        name = len(self.communicators).to_bytes(128, "big")
        self.communicators[name] = Communicator(len(self.communicators) < self._hanging)
        return name

    def join(self, unique_id: bytes, size: int) -> Communicator:
        return self.communicators[unique_id]


class Server:
    """As much of a `SnapshotServer` as groups use."""

    def __init__(self, snapshot: Any) -> None:
        self.sent, self.replies = SentStats(), []
        self.find = {snapshot.name: snapshot}.get

    def call_soon(self, act: Callable[[], None]) -> None:
        act()

    def reply(self, client: bytes, message: Any) -> None:
        self.replies.append((client, message))


def log() -> Any:
    return SimpleNamespace(warning=lambda *_, **__: None)


@pytest.mark.parametrize("generators", [1, 12])
def test_all_groups_send_through_the_same_few_buffers(monkeypatch: pytest.MonkeyPatch, generators: int) -> None:
    monkeypatch.setattr(nccl_groups, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(nccl_groups, "SILENCE", PATIENCE)  # a machine that is busy loses no group
    snapshot = take_snapshot(0, random_weights(seed=1).items(), torch.float32, 1 << 20)
    nccl, server = Nccl(hanging=0), Server(snapshot)
    groups = NcclGroups(nccl, log())
    for number in range(generators):
        client = bytes([number])
        assert isinstance(groups.answer(server, client, Join(workers=1)), Group)
        assert isinstance(groups.answer(server, client, Receive(snapshot=snapshot.name)), Sending)
    eventually(lambda: not groups.reads(snapshot.memory))
    expected = snapshot.memory.data[: snapshot.manifest.total_bytes].numpy().tobytes()
    assert all(each.sent == expected for each in nccl.communicators.values())
    assert len(set.union(*(each.buffers for each in nccl.communicators.values()))) <= staging.BUFFERS
    groups.close()


def test_a_buffer_is_replaced_by_whoever_takes_it_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who gives one up still has a group to abort, for which making another one might wait."""
    buffers = staging.Staging(PIECE, torch.device("cpu"))
    kept = [buffers.take(lambda: True) for _ in range(staging.BUFFERS)]
    made: list[int] = []
    empty = torch.empty

    def counted(*arguments: Any, **options: Any) -> torch.Tensor:
        made.append(threading.get_ident())
        return empty(*arguments, **options)

    monkeypatch.setattr(staging.torch, "empty", counted)
    monkeypatch.setattr(staging.torch, "empty_like", counted)
    assert kept[0] is not None
    buffers.replace(kept[0])
    assert not made
    other = buffers.take(lambda: True)
    assert made
    assert other is not None
    assert other.shape == (PIECE,)
    assert other.data_ptr() not in {buffer.data_ptr() for buffer in kept if buffer is not None}


def test_generators_that_die_in_the_middle_delay_nobody_even_if_their_groups_cannot_be_aborted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nccl_groups, "PIECE_BYTES", PIECE)
    dead = 2 * staging.BUFFERS  # more than there are buffers
    snapshot = take_snapshot(0, random_weights(seed=2).items(), torch.float32, 1 << 20)
    nccl, server = Nccl(hanging=dead), Server(snapshot)
    groups = NcclGroups(nccl, log())
    with monkeypatch.context() as patch:
        patch.setattr(nccl_groups, "SILENCE", SHORT)
        for number in range(dead):
            groups.answer(server, bytes([number]), Join(workers=1))
            groups.answer(server, bytes([number]), Receive(snapshot=snapshot.name))
    eventually(lambda: sum(each.is_sending.is_set() for each in nccl.communicators.values()) >= staging.BUFFERS)
    assert groups.reads(snapshot.memory)  # which must not be written to while they may still get it
    groups.answer(server, b"alive", Join(workers=1))
    groups.answer(server, b"alive", Receive(snapshot=snapshot.name))
    *hanging, living = nccl.communicators.values()
    eventually(lambda: not groups.reads(snapshot.memory))
    assert living.sent == snapshot.memory.data[: snapshot.manifest.total_bytes].numpy().tobytes()
    # Their aborts have not returned, and what the GPU may still write to is nobody else's.
    assert not any(each.aborted.is_set() for each in hanging if each.is_sending.is_set())
    assert not living.buffers & set.union(*(each.buffers for each in hanging))
    eventually(lambda: {client for client, _ in server.replies} == {bytes([number]) for number in range(dead)})
    assert all(isinstance(message, Dissolved) for _, message in server.replies)
    for each in hanging:
        each.may_abort.set()
    groups.close()
