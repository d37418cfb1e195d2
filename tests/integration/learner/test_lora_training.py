"""Training an adapter: it learns, goes on from a checkpoint, and is exported merged and by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from common.config import parse_config
from learner.export import export_checkpoint
from tests.support.learner import run_ranks, without_export

pytestmark = [pytest.mark.integration, pytest.mark.slow]
LORA = {"rank": 4, "alpha": 8}
KL = {"algorithm": {"kl_coef": 0.1}}


def job(model: str, folder: Path, steps: int, **others: Any) -> dict[str, Any]:
    own = {key: others.pop(key) for key in ("load", "save", "advantage", "repeat") if key in others}
    folder.mkdir(exist_ok=True)
    return {"model": model, "folder": str(folder), "steps": steps, "learner": {"lora": LORA} | others} | own


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lora")


@pytest.fixture(scope="module")
def alone(model: str, folder: Path) -> dict[str, Any]:
    """Jobs of one rank."""
    half = {"dtype": "bfloat16", "zero_stage": 2, "mini_batches": 2}
    todo = {
        "straight": job(model, folder / "straight", 3, **KL),
        "first half": job(model, folder / "halves", 2, save=[2], **KL),
        "second half": job(model, folder / "halves", 3, load=True, **KL),
        "bf16 straight": job(model, folder / "bf16", 3, **half),
        "bf16 first half": job(model, folder / "bf16 halves", 2, save=[2], **half),
        "bf16 second half": job(model, folder / "bf16 halves", 3, load=True, **half),
        "praised": job(model, folder / "praised", 4, advantage=1.0, repeat=True, lr=1e-2),
        "all weights": job(model, folder / "all", 2, save=[2], lora=None),
    }
    return run_ranks(1, todo, folder)


@pytest.fixture(scope="module")
def pair(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Jobs of two ranks, with parameters in pieces."""
    folder = tmp_path_factory.mktemp("pair")
    todo = {
        "straight": job(model, folder / "straight", 3, zero_stage=3, **KL),
        "first half": job(model, folder / "halves", 2, save=[2], zero_stage=3, **KL),
        "second half": job(model, folder / "halves", 3, load=True, zero_stage=3, **KL),
    }
    return run_ranks(2, todo, folder) | {"folder": folder}


def assert_same(one: dict[str, Any], other: dict[str, Any], rtol: float = 0.0) -> None:
    assert one["weights"].keys() == other["weights"].keys()
    for name, weight in other["weights"].items():
        torch.testing.assert_close(one["weights"][name], weight, rtol=rtol, atol=rtol / 10)


def test_training_an_adapter_raises_the_likelihood_of_what_is_praised(alone):
    gaps = [metrics["rollout_corr/kl"] for metrics in alone["praised"]["metrics"]]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[0] - gaps[-1] > 0.1


@pytest.mark.parametrize("precision", ["", "bf16 "])
def test_a_resumed_run_has_the_adapter_of_one_that_never_stopped(alone, precision):
    assert alone[f"{precision}second half"]["loaded"] == 2
    assert_same(alone[f"{precision}second half"], alone[f"{precision}straight"])


def test_ranks_that_hold_pieces_train_the_same_adapter_and_resume_to_it(alone, pair):
    assert pair["second half"]["loaded"] == 2
    assert_same(pair["second half"], pair["straight"])
    assert_same(pair["straight"], alone["straight"], rtol=1e-3)


def test_the_penalty_is_measured_from_the_model_without_the_adapter(alone, pair):
    for run in (alone, pair):
        kl = [metrics["actor/kl_loss"] for metrics in run["straight"]["metrics"]]
        assert kl[0] == pytest.approx(0, abs=1e-7)
        assert kl[2] > kl[1] > 1e-5


def test_a_checkpoint_does_not_hold_the_base_model_again(alone, folder, model):
    states = {
        kind: sum(path.stat().st_size for path in (folder / kind / "default/checkpoints/step_2/deepspeed").iterdir())
        for kind in ("halves", "all")
    }
    assert states["halves"] < (Path(model) / "model.safetensors").stat().st_size < states["all"]


@pytest.mark.parametrize("ranks", ["alone", "pair"])
def test_the_exported_model_is_the_base_model_with_the_exported_adapter(request, folder, model, ranks):
    run = request.getfixturevalue(ranks)
    checkpoint = (run.get("folder") or folder) / "halves/default/checkpoints/step_2"
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


@pytest.mark.parametrize("ranks", ["alone", "pair"])
def test_a_checkpoint_without_an_export_is_exported_later_with_its_adapter_merged(
    request, folder, model, tmp_path, ranks
):
    run = request.getfixturevalue(ranks)
    made = (run.get("folder") or folder) / "halves/default/checkpoints/step_2"
    without = without_export(made, tmp_path / "step_2")
    values = {"model": {"path": model}, "data": {"train": "none.jsonl"}, "learner": {"lora": LORA, "dtype": "float32"}}
    export_checkpoint(parse_config(values), without, tmp_path / "out")
    expected, merged = (load_file(path / "model.safetensors") for path in (made / "hf", tmp_path / "out"))
    assert merged.keys() == expected.keys()
    assert all(torch.equal(merged[name], weight) for name, weight in expected.items())
