"""A critic beside the policy: both learn, stay equal over ranks and stages, and go on from one checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.learner import assert_same_weights, job, run_ranks, save_tiny_model
from tests.support.mixtures import save_mixture

pytestmark = [pytest.mark.integration, pytest.mark.slow]

STAGES = (0, 3)
CRITIC: dict[str, Any] = {"algorithm": {"baseline": "critic"}, "critic": {"gae_lambda": 0.9, "lr": 3e-3}}


def critic(baseline: str = "critic", **settings: Any) -> dict[str, Any]:
    return {"algorithm": {"baseline": baseline}, "critic": CRITIC["critic"] | settings}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("alone")


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of the policy's vocabulary, and smaller."""
    return save_tiny_model(tmp_path_factory.mktemp("other"), layers=1, seed=7)


@pytest.fixture(scope="module")
def alone(model: str, other_model: str, folder: Path) -> dict[str, Any]:
    """Jobs of one rank."""
    rich = CRITIC | {"mini_batches": 3, "schedule": "cosine", "grad_clip": 0.5}
    half = critic("both", freeze_attention=True) | {"dtype": "bfloat16", "mini_batches": 2}
    save_mixture(folder / "mixture", "Qwen3-MoE")
    todo = {
        "straight": job(model, folder / "straight", 4, rich),
        "first half": job(model, folder / "halves", 2, rich, save=[2]),
        "second half": job(model, folder / "halves", 4, rich, load=True),
        "bf16 straight": job(model, folder / "bf16", 4, half),
        "bf16 first half": job(model, folder / "bf16 halves", 2, half, save=[2]),
        "bf16 second half": job(model, folder / "bf16 halves", 4, half, load=True),
        "repeated": job(model, folder / "repeated", 8, critic(lr=3e-3), repeat=True),
        "by turn": job(model, folder / "by turn", 1, critic(), turns=True),
        "of a mixture": job(str(folder / "mixture"), folder / "of a mixture", 2, critic()),
        "tracker": job(model, folder / "tracker", 2, {}),
        "warming up": job(model, folder / "warming up", 2, critic(warmup_steps=2)),
        "both": job(model, folder / "both", 2, critic("both")),
        "small": job(model, folder / "small", 1, critic(model=other_model)),
        "other critic": job(model, folder / "halves", 0, critic(model=other_model), load=True, refused=True),
        "no critic": job(model, folder / "halves", 0, {}, load=True, refused=True),
        "no critic yet": job(model, folder / "tracker saved", 1, {}, save=[1]),
        "a critic later": job(model, folder / "tracker saved", 0, critic(), load=True, refused=True),
    }
    return run_ranks(1, todo, folder)


@pytest.fixture(scope="module")
def pair(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Jobs of two ranks."""
    folder = tmp_path_factory.mktemp("pair")
    todo = {}
    for stage in STAGES:
        here, learner = folder / f"stage {stage}", CRITIC | {"zero_stage": stage, "grad_clip": 0.5}
        todo |= {
            f"{stage} straight": job(model, here, 3, learner),
            f"{stage} first half": job(model, here, 2, learner, save=[2]),
            f"{stage} second half": job(model, here, 3, learner, load=True),
        }
    results = run_ranks(2, todo, folder)
    # What two ranks saved under ZeRO 3, one goes on from.
    shutil.copytree(folder / "stage 3", folder / "redivided")
    redivided = job(model, folder / "redivided", 3, CRITIC | {"zero_stage": 0, "grad_clip": 0.5}, load=True)
    return results | run_ranks(1, {"redivided": redivided}, folder) | {"folder": folder}


@pytest.mark.parametrize("kind", ["", "bf16 "])
def test_a_resumed_run_has_the_policy_and_the_critic_of_one_that_never_stopped(alone, kind):
    stopped, straight = alone[f"{kind}second half"], alone[f"{kind}straight"]
    assert stopped["loaded"] == 2
    assert_same_weights(stopped, straight)
    assert_same_weights(stopped["critic"], straight["critic"])
    for ours, theirs in zip(stopped["metrics"], straight["metrics"][2:], strict=True):
        assert ours["critic/explained_variance"] == theirs["critic/explained_variance"]


@pytest.mark.parametrize("stage", STAGES)
def test_zero_stages_train_and_resume_a_critic_to_the_same_weights(pair, stage):
    stopped, straight = pair[f"{stage} second half"], pair[f"{stage} straight"]
    assert stopped["loaded"] == 2
    for run, same, elsewhere in (
        (stopped, straight, pair["0 straight"]),
        (stopped["critic"], straight["critic"], pair["0 straight"]["critic"]),
    ):
        assert_same_weights(run, same)
        assert_same_weights(same, elsewhere, rtol=1e-3)


def test_another_number_of_ranks_goes_on_from_a_critics_checkpoint(pair):
    assert pair["redivided"]["loaded"] == 2
    assert_same_weights(pair["redivided"], pair["3 straight"], rtol=1e-3)
    assert_same_weights(pair["redivided"]["critic"], pair["3 straight"]["critic"], rtol=1e-3)


def test_a_critic_learns_the_returns_of_what_it_sees_again(alone):
    explained = [metrics["critic/explained_variance"] for metrics in alone["repeated"]["metrics"]]
    losses = [metrics["critic/loss"] for metrics in alone["repeated"]["metrics"]]
    assert explained[0] == pytest.approx(0.0, abs=1e-6), "a head of zeros tells nothing"
    assert explained[-1] > 0.5
    assert losses[-1] < losses[0] / 2


def test_the_values_begin_at_the_middle_or_at_the_trackers(alone):
    assert alone["straight"]["metrics"][0]["critic/value_mean"] == 0.5
    first = alone["both"]["metrics"][0]
    assert first["critic/explained_variance"] == pytest.approx(first["critic/tracker_explained_variance"], abs=1e-6)
    assert first["critic/value_mean"] != 0.5


def test_in_the_warm_up_the_policy_learns_as_without_a_critic(alone):
    assert_same_weights(alone["warming up"], alone["tracker"])
    assert alone["warming up"]["metrics"][1]["critic/explained_variance"] != 0


@pytest.mark.parametrize("kind", ["by turn", "of a mixture", "small"])
def test_every_kind_of_batch_and_model_is_judged(alone, kind):
    metrics = alone[kind]["metrics"][-1]
    assert metrics["critic/grad_norm"] > 0
    assert metrics["actor/grad_norm"] > 0


def test_frozen_attention_stays_as_it_was_and_the_rest_is_trained(alone, model):
    start = {name: weight.bfloat16() for name, weight in load_file(Path(model, "model.safetensors")).items()}
    now = alone["bf16 straight"]["critic"]["weights"]
    assert now["score.weight"].abs().max() > 0
    attention = [name for name in now if "self_attn" in name]
    assert attention
    assert all(torch.equal(now[name], start[name]) for name in attention)
    assert not torch.equal(now["model.layers.1.mlp.up_proj.weight"], start["model.layers.1.mlp.up_proj.weight"])


def test_an_exported_critic_is_one_to_start_from(pair, model):
    stage = 3
    step = pair["folder"] / f"stage {stage}" / "default" / "checkpoints" / "step_2"
    exported, trained = load_file(step / "critic" / "model.safetensors"), pair[f"{stage} first half"]["critic"]
    assert all(torch.equal(exported[name], weight) for name, weight in trained["weights"].items())
    # With a learning rate of next to nothing it stays what it was when it was exported.
    learner = critic(model=str(step / "critic"), lr=1e-30, updates=1)
    folder = pair["folder"] / f"from {stage}"
    started = run_ranks(1, {"started": job(model, folder, 1, learner)}, folder)["started"]
    assert_same_weights(started["critic"], trained)


@pytest.mark.parametrize(
    ("run", "words"),
    [
        ("other critic", "was written with critic = {'model': "),
        ("no critic", "(here None); start the learner with its values"),
        ("a critic later", "was written with critic = None (here {"),
    ],
)
def test_a_checkpoint_of_another_critic_is_refused_in_a_line(alone, run, words):
    line = alone[run]["refused"]
    assert words in line
    assert "\n" not in line
