"""Serves the learner's newest weights: each version is copied once and sent from the copy."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from common.config import WeightsConfig
from common.errors import UserError
from common.log import get_logger
from common.messages import InvalidMessage
from common.weights.listener import Place
from common.weights.server import SnapshotServer
from common.weights.wire import Dissolved, Fetch, Gone, Group, Join, Receive, Request, Sending
from learner.nccl import CudaNccl, Nccl, NcclFailed
from learner.nccl_groups import BUFFER_BYTES, Groups
from learner.snapshot import take_snapshot


class WeightServer(SnapshotServer):
    """A server that takes tensors, and with the backend `nccl` sends them from this process's GPU.

    Args:
        nccl: makes that backend's groups.

    Raises:
        UserError: see `SnapshotServer`; or the backend `nccl` without a GPU.
    """

    def __init__(self, config: WeightsConfig, *, log: Any = None, nccl: Callable[[], Nccl] | None = None) -> None:
        self._groups: Groups | None = None
        if config.backend == "nccl":
            self._groups = Groups((nccl or _nccl_of_this_gpu)(), self._dissolved, log or get_logger())
        super().__init__(Place(config.bind, config.advertise, config.curve_dir), config.credit, log=log)
        self._chunk_bytes = config.chunk_mib << 20
        self._life = secrets.token_hex(8)
        self._published = 0

    def publish(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | str) -> None:
        """Copy the weights and serve them from now on; returns after the copy.

        Args:
            version: weights after this many learner steps.
            tensors: (name, tensor) as `transformers` names them, each tied tensor once.
            dtype: what floating-point tensors are sent as.
        """
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        name = f"{self._life}-{self._published}"
        self.serve(take_snapshot(version, tensors, dtype, self._chunk_bytes, snapshot=name, buffer=self.spare()))
        self._published += 1

    def spare(self) -> Any:
        """See `SnapshotServer`; never what NCCL still reads."""
        memory = super().spare()
        return None if self._groups is not None and self._groups.reads(memory) else memory

    def close(self) -> None:
        """Stop serving."""
        if self._groups is not None:
            self._groups.close()
        super().close()

    def _answer(self, client: bytes, request: Request) -> None:
        groups = self._groups
        if groups is None or isinstance(request, Fetch):
            if groups is not None:
                raise InvalidMessage("weight request: learner.weights.backend is nccl here, nothing is fetched")
            super()._answer(client, request)
            return
        groups.heard(client)
        if isinstance(request, Join):
            try:
                unique_id = groups.join(client, request.workers)
            except NcclFailed as error:
                self._send(client, Dissolved(reason=str(error)).pack())
                return
            self._send(client, Group(unique_id=unique_id, buffer_bytes=BUFFER_BYTES).pack())
        elif isinstance(request, Receive):
            self._send(client, self._broadcast(groups, client, request.snapshot).pack())
        else:
            super()._answer(client, request)

    def _broadcast(self, groups: Groups, client: bytes, name: str) -> Sending | Gone | Dissolved:
        snapshot = self._find(name)
        if snapshot is None:
            return Gone(snapshot=name)
        if not groups.send(client, snapshot):
            return Dissolved(reason="you are in no group")
        self.sent.bytes += snapshot.manifest.total_bytes
        self.sent.chunks += len(snapshot.manifest.checksums)
        return Sending(snapshot=name)

    def _tell(self, client: bytes, reply: Dissolved) -> None:
        self._send(client, reply.pack())

    def _dissolved(self, client: bytes, reason: str) -> None:
        """In a group's thread: tell its generator from ours."""
        with contextlib.suppress(OSError):  # the server is closed
            self._order(partial(self._tell, client, Dissolved(reason=reason)))


def _nccl_of_this_gpu() -> Nccl:
    if not torch.cuda.is_available():
        raise UserError("learner.weights.backend = 'nccl' needs a GPU, and torch sees none; set it to zmq")
    try:
        return CudaNccl(torch.device("cuda", torch.cuda.current_device()))
    except NcclFailed as error:
        raise UserError(f"learner.weights.backend = 'nccl': {error}; set it to zmq") from None
