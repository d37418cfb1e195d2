"""vLLM's side of weights by NCCL: the workers receive one stream of bytes, cut into pieces of one size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer import nccl_common
from vllm.distributed.weight_transfer.base import WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo

from generator.weights.weight_engine import CheckpointWeightEngine


@dataclass
class NcclUpdateInfo(WeightTransferUpdateInfo):
    """What is in the stream, column by column ([N] each).

    Attributes:
        names: as the model's checkpoint names them.
        dtypes: torch type names.
        shapes: full shapes; a worker takes its shard.
        offsets: bytes from the start of the stream, ascending.
        total_bytes: of the stream.
    """

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    offsets: list[int]
    total_bytes: int


class NcclWeightEngine(CheckpointWeightEngine[NCCLWeightTransferInitInfo, NcclUpdateInfo]):
    """Receives what the learner broadcasts, through one buffer of `packed_buffer_size_bytes`."""

    init_info_cls = NCCLWeightTransferInitInfo
    update_info_cls = NcclUpdateInfo

    _group: Any = None
    _piece_bytes = 0

    def init_transfer_engine(self, init_info: NCCLWeightTransferInitInfo) -> None:
        """Join the learner's group."""
        self._piece_bytes = init_info.packed_buffer_size_bytes
        self._group = nccl_common.worker_init_process_group(init_info, self.parallel_config)

    def receive_weights(self, update_info: NcclUpdateInfo) -> None:
        """Receive and load all weights; raises like `load`."""

        def receive(piece: torch.Tensor) -> None:
            self._group.broadcast(piece, src=0)

        # On the current stream as the copies out of the buffer are: it is written to again after those.
        self.load(received(update_info, receive, self._piece_bytes, self.device), update_info.names)
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def shutdown(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.destroy()
            self._group = None


def received(
    info: NcclUpdateInfo, receive: Callable[[torch.Tensor], None], piece_bytes: int, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in a stream of bytes, each in memory of its own.

    Args:
        receive: fills uint8 [n] with the next n bytes, at most `piece_bytes` of them.
    """
    pieces = _Pieces(info.total_bytes, receive, piece_bytes, device)
    for name, dtype, shape, offset in zip(info.names, info.dtypes, info.shapes, info.offsets, strict=True):
        kind = getattr(torch, dtype)
        tensor = torch.empty(math.prod(shape) * kind.itemsize, dtype=torch.uint8, device=device)
        done = 0
        while done < len(tensor):
            part = pieces.at(offset + done)[: len(tensor) - done]
            tensor[done : done + len(part)].copy_(part)
            done += len(part)
        yield name, tensor.view(kind).view(shape)


class _Pieces:
    """A stream that is received piece by piece into one buffer."""

    def __init__(
        self, total_bytes: int, receive: Callable[[torch.Tensor], None], piece_bytes: int, device: torch.device
    ) -> None:
        self._total, self._receive = total_bytes, receive
        self._buffer = torch.empty(min(piece_bytes, total_bytes), dtype=torch.uint8, device=device)
        self._start = self._end = 0  # of the stream's bytes in the buffer

    def at(self, position: int) -> torch.Tensor:
        """The bytes from a position, not before that of the last call, to the end of its piece."""
        while position >= self._end:
            self._start, self._end = self._end, min(self._end + len(self._buffer), self._total)
            self._receive(self._buffer[: self._end - self._start])
        return self._buffer[position - self._start : self._end - self._start]
