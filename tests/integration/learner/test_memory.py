"""Under ZeRO 3 no rank ever holds a whole model: not while it is loaded, and not while it is asked."""

from __future__ import annotations

import ctypes
import gc
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.learner import NOTHING_KEPT, learner_config, make_batch, make_samples, save_tiny_model
from tests.support.ranks import on_ranks

if TYPE_CHECKING:
    from learner.ranks.world import World

pytestmark = pytest.mark.slow

RANKS = 2


def peak_bytes(act: Callable[[], Any]) -> tuple[Any, int]:
    """Does something; returns its result, and the most memory of this process meanwhile beyond that before.

    What is mapped from files does not count: the system takes it back when it needs it.
    """
    m_mmap_threshold = -3  # what is freed goes back to the system at once, and does not hide what comes after it
    ctypes.CDLL(None).mallopt(m_mmap_threshold, 1 << 16)
    gc.collect()
    before = most = anonymous_bytes()
    is_over = threading.Event()

    def watch() -> None:
        nonlocal most
        while not is_over.wait(0.001):
            most = max(most, anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        result = act()
        most = max(most, anonymous_bytes())
    finally:
        is_over.set()
        watcher.join()
    return result, most - before


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def measure(world: World, models: list[str], folder: str) -> None:
    """One rank: load policy and reference, and ask the reference; leaves the peak of each in bytes.

    It begins with a small model, so that what is imported and set up only once does not count.
    """
    from learner.policy.engine import load_on_ranks
    from learner.reference import load_reference

    def peaks(path: str) -> dict[str, int]:
        config = learner_config(path, folder, zero_stage=3, algorithm={"kl_coef": 0.1}, deepspeed=NOTHING_KEPT)
        micro = make_batch(config, *make_samples(4), rank=world.rank, ranks=world.size).mini_batches[0][0]
        policy, loaded = peak_bytes(lambda: load_on_ranks(config, world))
        reference, reference_loaded = peak_bytes(lambda: load_reference(config, world, engine=None))
        logprobs, asked = peak_bytes(lambda: reference(micro))
        assert len(logprobs) == micro.model_tokens
        whole = sum(parameter.ds_numel * parameter.element_size() for parameter in policy.parameters())
        return {"whole": whole, "policy": loaded, "reference": reference_loaded, "asked": asked}

    for path in models:
        Path(folder, f"peaks.{world.rank}").write_text(json.dumps(peaks(path)))


def test_a_rank_holds_its_part_of_a_model_and_a_layer(tmp_path: Path) -> None:
    models = [save_tiny_model(tmp_path / "small"), save_tiny_model(tmp_path / "model", hidden=256, layers=16)]
    on_ranks(RANKS, measure, models, str(tmp_path), folder=tmp_path)
    for rank in range(RANKS):
        peaks = json.loads((tmp_path / f"peaks.{rank}").read_text())
        assert peaks["whole"] > 30e6, "large enough that a part of it can be told from all"
        for model in ("policy", "reference"):
            assert peaks["whole"] / RANKS <= peaks[model] < 0.75 * peaks["whole"], model
        # What is gathered for a layer is given up before the next one.
        assert peaks["asked"] < 0.3 * peaks["whole"]
