"""Weights by NCCL as bytes: what the learner cuts into pieces, a worker puts together again."""

from __future__ import annotations

import pytest
import torch

from generator.weights.nccl_engine import NcclUpdateInfo, received
from generator.weights.nccl_weights import NcclWeights
from learner.nccl_groups import pieces
from learner.weight_copy import take_snapshot

WEIGHTS = {
    "embedding": torch.randn(40, 16).bfloat16(),
    "none": torch.empty(0, 16),
    "norm": torch.randn(3),
    "counts": torch.arange(7),
    "head": torch.randn(33, 5).bfloat16(),
}


@pytest.mark.parametrize("size", [1, 7, 64, 100, 1279, 1280, 1281, 1 << 20])
def test_tensors_arrive_bit_by_bit_however_they_are_cut(size: int) -> None:
    snapshot = take_snapshot(0, WEIGHTS.items(), torch.bfloat16, 1 << 20)
    stream = pieces(snapshot, size)
    buffers = []

    def receive(buffer: torch.Tensor) -> None:
        piece = next(stream)
        assert len(piece) == len(buffer) <= size
        buffer.copy_(piece)
        buffers.append(buffer.data_ptr())

    info = NcclUpdateInfo(**NcclWeights(snapshot.manifest).update_info())
    arrived = dict(received(info, receive, size, torch.device("cpu")))
    assert next(stream, None) is None  # nothing is left that the learner would wait to send
    assert len(set(buffers)) == 1  # one buffer, however large the model is
    assert list(arrived) == list(WEIGHTS)
    for name, tensor in WEIGHTS.items():
        wire = tensor.bfloat16() if tensor.is_floating_point() else tensor
        assert arrived[name].dtype == wire.dtype
        assert torch.equal(arrived[name], wire)
