"""Ranks of one machine copy a version together: each its share, into one memory, with the checksums of the whole."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from common.weights.wire import checksum
from learner.publish import publisher as publishing
from learner.publish import weight_server as serving
from learner.publish.publisher import RankCopies, share
from learner.publish.weight_copy import copy_weights
from learner.publish.weight_server import WeightServer
from learner.ranks.world import World
from tests.support.learner import learner_config
from tests.support.ranks import on_ranks

CHUNK = 1 << 20
VERSIONS = 5


def weights(version: int, seed: int) -> dict[str, torch.Tensor]:
    """Tensors that neither begin nor end where chunks do, 14.2 MB."""
    generator = torch.Generator().manual_seed(1000 * version + seed)
    shapes = {"a": (1001, 1003), "b": (7,), "c": (2000, 1200), "d": (150_001,)}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return tensors | {"steps": torch.tensor([version])}


def copy_versions(world: World, folder: Path, elsewhere: tuple[int, ...]) -> None:
    """Each rank has weights of its own, so that every chunk shows which rank has copied it."""
    if world.rank in elsewhere:
        publishing.boot_id = lambda: "another machine"
    publishing.CHUNK_BYTES = serving.CHUNK_BYTES = CHUNK
    config = learner_config("m", folder)
    copies = RankCopies(config, world)
    server = WeightServer(config.learner.weights) if world.is_main else None
    members = [rank for rank in range(world.size) if rank not in elsewhere]
    for version in range(VERSIONS):
        trained = weights(version, world.rank)
        copy = copies.copy(server, version, trained.items(), None)
        for tensor in trained.values():
            tensor.zero_()  # the next step; the copy stays as it is
        checksums = copies.checksums(copy)
        if server is None:
            continue
        snapshot = copy.snapshot(checksums)
        assert [checksum(chunk) for chunk in snapshot.chunks] == snapshot.manifest.checksums
        # The first version, whose size was not known, is rank 0's alone.
        owners = members if version else [0]
        whole = {
            rank: copy_weights(version, weights(version, rank).items(), torch.float32, CHUNK).snapshot()
            for rank in owners
        }
        for index, rank in enumerate(owners):
            part = share(snapshot.manifest.total_bytes, CHUNK, index, len(owners))
            assert len(part) > 0
            chunks = range(part.start // CHUNK, -(-part.stop // CHUNK))
            assert all(snapshot.chunks[chunk] == whole[rank].chunks[chunk] for chunk in chunks)
        assert snapshot.manifest.offsets == whole[0].manifest.offsets
        server.serve(copy, checksums)
    if server is not None:
        server.close()


@pytest.mark.slow
@pytest.mark.parametrize("elsewhere", [(), (1,)], ids=["one machine", "one of another"])
def test_each_rank_that_reaches_the_memory_copies_its_share(tmp_path: Path, elsewhere: tuple[int, ...]) -> None:
    on_ranks(3, copy_versions, tmp_path, elsewhere, folder=tmp_path)


@pytest.mark.parametrize(("size", "count"), [(1, 3), (5 * CHUNK - 3, 2), (5 * CHUNK, 8), (64 * CHUNK + 1, 3)])
def test_shares_are_whole_chunks_that_make_up_the_whole(size: int, count: int) -> None:
    shares = [share(size, CHUNK, index, count) for index in range(count)]
    assert (shares[0].start, shares[-1].stop) == (0, size)
    assert all(one.stop == other.start for one, other in pairwise(shares))
    assert all(part.start % CHUNK == 0 or not len(part) for part in shares)
    chunks = [-(-len(part) // CHUNK) for part in shares]
    assert max(chunks) - min(chunks) <= 1
