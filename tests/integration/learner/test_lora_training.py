"""Training an adapter: it learns, goes on from a checkpoint, and is exported merged and by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.support.learner import assert_same_weights, job, run_ranks

pytestmark = [pytest.mark.integration, pytest.mark.slow]
LORA = {"lora": {"rank": 4, "alpha": 8}}
KL = LORA | {"algorithm": {"kl_coef": 0.1}}
STEP = "halves/default/checkpoints/step_2"


def jobs(model: str, folder: Path, learner: dict[str, Any]) -> dict[str, Any]:
    """Three steps at once, and with a stop after two."""
    return {
        "straight": job(model, folder, 3, learner),
        "first half": job(model, folder / "halves", 2, learner, save=[2]),
        "second half": job(model, folder / "halves", 3, learner, load=True),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("alone")


@pytest.fixture(scope="module")
def runs(model: str, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Results on one rank, and on two with parameters in pieces; and the folder of each."""
    todo = jobs(model, folder, KL)
    todo["praised"] = job(model, folder, 4, LORA | {"lr": 1e-2}, advantage=1.0, repeat=True)
    todo["all"] = job(model, folder / "all", 2, {}, save=[2])
    pair = tmp_path_factory.mktemp("pair")
    return {
        "alone": run_ranks(1, todo, folder) | {"folder": folder},
        "pair": run_ranks(2, jobs(model, pair, KL | {"zero_stage": 3}), pair) | {"folder": pair},
    }


def test_an_adapter_learns_what_is_praised_on_any_ranks(runs):
    gaps = [metrics["rollout_corr/kl"] for metrics in runs["alone"]["praised"]["metrics"]]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[0] - gaps[-1] > 0.1
    assert_same_weights(runs["pair"]["straight"], runs["alone"]["straight"], rtol=1e-3)


@pytest.mark.parametrize("ranks", ["alone", "pair"])
def test_a_resumed_run_has_the_adapter_of_one_that_never_stopped(runs, ranks):
    assert runs[ranks]["second half"]["loaded"] == 2
    assert_same_weights(runs[ranks]["second half"], runs[ranks]["straight"])


def test_a_checkpoint_does_not_hold_the_base_model_again(runs, folder, model):
    adapter, everything = (
        sum(path.stat().st_size for path in (folder / kind / "default/checkpoints/step_2/deepspeed").iterdir())
        for kind in ("halves", "all")
    )
    assert adapter < (Path(model) / "model.safetensors").stat().st_size < everything


@pytest.mark.parametrize("ranks", ["alone", "pair"])
def test_penalty_and_export_are_of_base_model_and_adapter(runs, model, ranks):
    run = runs[ranks]
    kl = [metrics["actor/kl_loss"] for metrics in run["straight"]["metrics"]]
    assert kl[0] == pytest.approx(0, abs=1e-7)
    assert kl[2] > kl[1] > 1e-5
    checkpoint = run["folder"] / STEP
    adapter = load_file(checkpoint / "adapter" / "adapter_model.safetensors")
    for name, weight in run["first half"]["weights"].items():
        assert torch.equal(adapter[name], weight), name
    base, merged = (AutoModelForCausalLM.from_pretrained(path) for path in (model, checkpoint / "hf"))
    ids = torch.arange(30)[None]
    with torch.no_grad():
        before = base(ids).logits
        beside = PeftModel.from_pretrained(base, checkpoint / "adapter")(ids).logits
        torch.testing.assert_close(merged(ids).logits, beside, rtol=1e-4, atol=1e-4)
    assert (beside - before).abs().max() > 0.01
