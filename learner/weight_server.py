"""Serves the learner's newest weights: each version is copied once and sent from the copy."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Any

import torch

from common.config import WeightsConfig
from common.weights.listener import Place
from common.weights.server import SnapshotServer
from learner.snapshot import take_snapshot


class WeightServer(SnapshotServer):
    """A server that takes tensors.

    Raises:
        UserError: see `SnapshotServer`.
    """

    def __init__(self, config: WeightsConfig, *, log: Any = None) -> None:
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
