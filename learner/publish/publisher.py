"""Publishes a version: the ranks copy its weights, score a prompt with them, and a thread serves the copy.

Each rank of rank 0's machine copies a part of the weights into the memory that rank 0 serves from. Ranks of other
machines only help to gather sharded weights. Training does not wait for checksums: the ranks' publishing threads
exchange them.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from common.config import Config
from common.weights.handover import boot_id
from common.weights.memory import MemoryFile
from common.weights.wire import CHUNK_BYTES
from learner.policy.attention import pack_sequences
from learner.publish.host_copy import HostMemory
from learner.publish.weight_copy import ScoredPrompt, WeightCopy, copy_weights
from learner.publish.weight_server import WeightServer
from learner.ranks.world import World
from learner.trainer import Trainer

KEPT = 3  # files of rank 0 that stay open: one is served, one is written, and one may still be read
PROMPT_LENGTH = 32  # tokens at most
PROMPT_STRIDE = 7919  # a prime, so that the tokens are spread over the vocabulary


@torch.no_grad()
def scored_prompt(trainer: Trainer) -> ScoredPrompt:
    """Score a fixed prompt at temperature 1, all ranks together; generators check the weights they receive with it."""
    # Special tokens, which an engine may treat in its own way, mostly come last in a vocabulary.
    plain = max(trainer.policy.vocabulary // 2, 1)
    length = min(PROMPT_LENGTH, trainer.config.model.max_model_len)
    token_ids = [PROMPT_STRIDE * (position + 1) % plain for position in range(length)]
    device = trainer.world.device
    tokens = torch.tensor(token_ids, device=device)
    logprobs, _ = trainer.engine(
        tokens[None],
        torch.arange(length, device=device)[None],
        pack_sequences([length], device),
        torch.arange(length - 1, device=device),
        tokens[1:],
        temperature=1.0,
    )
    return ScoredPrompt(token_ids, logprobs.tolist())


class RankCopies:
    """Copies of the weights by all ranks, which call the same methods at the same time."""

    def __init__(self, config: Config, world: World) -> None:
        self._world = world
        self._in_thread = world.beside(config.learner.rank_timeout)
        self._dtype = getattr(torch, config.model.dtype)
        self._opened: OrderedDict[tuple[str, int], HostMemory] = OrderedDict()

    def copy(
        self,
        server: WeightServer | None,
        version: int,
        tensors: Iterable[tuple[str, torch.Tensor]],
        prompt: ScoredPrompt | None,
    ) -> WeightCopy:
        """Copy this rank's share of the weights for rank 0's server; other arguments as in `WeightServer.copy`."""
        memory, share = None if server is None else server.memory(), None
        if self._world.size > 1:
            memory, share = self._divide(memory)
        options: dict[str, Any] = {"memory": memory, "device": self._world.device, "share": share}
        if server is not None:
            return server.copy(version, tensors, self._dtype, prompt, **options)
        return copy_weights(version, tensors, self._dtype, CHUNK_BYTES, **options)

    def checksums(self, copy: WeightCopy) -> dict[int, int]:
        """Gather the checksums of all chunks; called in one thread of each rank, one copy after another."""
        own = copy.sums.result()
        if self._world.size == 1:
            return own
        packed = np.array(list(own.items()), np.uint64).tobytes()
        parts = [np.frombuffer(part, np.uint64).reshape(-1, 2).tolist() for part in self._in_thread.gather(packed)]
        return {chunk: value for part in parts for chunk, value in part}

    def _divide(self, memory: HostMemory | None) -> tuple[HostMemory | None, range | None]:
        """Memory and share of this rank; rank 0 alone copies the first version, whose size is not known yet."""
        offer = b""
        if memory is not None:
            file = memory.file
            offer = json.dumps([boot_id(), file.path, file.inode, file.size]).encode()
        offer = self._world.broadcast(offer)
        if not offer:
            return memory, None if self._world.is_main else range(0)
        if not self._world.is_main:
            memory = self._open(*json.loads(offer))
        able = [rank for rank, flag in enumerate(self._world.gather(b"1" if memory is not None else b"")) if flag]
        if memory is None:
            return None, range(0)
        return memory, share(memory.file.size, CHUNK_BYTES, able.index(self._world.rank), len(able))

    def _open(self, machine: str, path: str, inode: int, size: int) -> HostMemory | None:
        """Rank 0's memory; None if this rank cannot reach it."""
        if machine != boot_id():
            return None
        key = path, inode
        if key not in self._opened:
            try:
                file = MemoryFile.opened(path, size)
            except (OSError, ValueError):
                return None
            if file.inode != inode:  # in another container, a path may name another file
                return None
            self._opened[key] = HostMemory(size, file)
            while len(self._opened) > KEPT:
                self._opened.popitem(last=False)
        self._opened.move_to_end(key)
        return self._opened[key]


def share(size: int, chunk_bytes: int, index: int, count: int) -> range:
    """Bytes of `size` that one of `count` ranks copies: whole chunks, as evenly as these allow."""
    chunks = -(-size // chunk_bytes)
    first, last = chunks * index // count, chunks * (index + 1) // count
    return range(min(first * chunk_bytes, size), min(last * chunk_bytes, size))


class Publisher:
    """A thread in which a version is served and announced while the next batch is trained on.

    It does one thing at a time; `wait` and `check` raise its errors.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "publish")
        self._under_way: Future[None] | None = None

    def submit(self, act: Callable[[], None]) -> None:
        """Begin an action, once the previous one is done."""
        self.wait()
        self._under_way = self._thread.submit(act)

    def wait(self) -> None:
        """Wait until no action is running; raises the action's error, once."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    @property
    def is_busy(self) -> bool:
        return self._under_way is not None and not self._under_way.done()

    def check(self) -> None:
        """Raise the error of a finished action, if it failed; does not wait."""
        if not self.is_busy:
            self.wait()

    def shutdown(self) -> None:
        """Wait until no action is running, and ignore its error."""
        self._thread.shutdown()
