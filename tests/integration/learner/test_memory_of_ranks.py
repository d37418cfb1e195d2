"""Under ZeRO 3 no rank ever holds a whole model: not while it is loaded, and not while it is asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.learner import learner_config, make_batch, make_samples, save_tiny_model
from tests.support.memory import peak_bytes
from tests.support.ranks import on_ranks

if TYPE_CHECKING:
    from learner.world import World

pytestmark = [pytest.mark.integration, pytest.mark.slow]

RANKS = 2
# By default DeepSpeed keeps a billion gathered parameters, which are all of a model as small as this.
NOTHING_KEPT = {
    "stage3_max_live_parameters": 1,
    "stage3_max_reuse_distance": 1,
    "stage3_prefetch_bucket_size": 1,
    "stage3_param_persistence_threshold": 1,
}


def measure(world: World, small: str, model: str, folder: str) -> None:
    """One rank: load policy and reference, and ask the reference; leaves the peak of each in bytes.

    Before that it does the same with a small model, so that what is imported and set up only once does not count.
    """
    from learner.engine import load_on_ranks
    from learner.reference import load_reference

    def peaks(path: str) -> dict[str, int]:
        config = learner_config(
            path,
            folder,
            zero_stage=3,
            algorithm={"kl_coef": 0.1},
            deepspeed={"zero_optimization": NOTHING_KEPT},
        )
        payloads, advantages = make_samples(4)
        micro = make_batch(config, payloads, advantages, rank=world.rank, ranks=world.size).mini_batches[0][0]
        policy, loaded = peak_bytes(lambda: load_on_ranks(config, world))
        reference, reference_loaded = peak_bytes(lambda: load_reference(config, world, engine=None))
        assert reference is not None
        logprobs, asked = peak_bytes(lambda: reference(micro))
        assert len(logprobs) == micro.model_tokens
        whole = sum(parameter.ds_numel * parameter.element_size() for parameter in policy.parameters())
        return {"whole": whole, "policy": loaded, "reference": reference_loaded, "asked": asked}

    peaks(small)
    Path(folder, f"found.{world.rank}").write_text(json.dumps(peaks(model)))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    small = save_tiny_model(folder / "small")
    model = save_tiny_model(folder / "model", hidden=256, layers=16)
    on_ranks(RANKS, measure, small, model, str(folder), folder=folder)
    return [json.loads((folder / f"found.{rank}").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_rank_holds_its_part_of_a_model_and_a_layer(found: list[dict[str, Any]], rank: int) -> None:
    whole = found[rank]["whole"]
    assert whole > 30e6, "large enough that a part of it can be told from all"
    for model in ("policy", "reference"):
        assert whole / RANKS <= found[rank][model] < 0.75 * whole, model
    # What is gathered for a layer is given up before the next one.
    assert found[rank]["asked"] < 0.3 * whole
