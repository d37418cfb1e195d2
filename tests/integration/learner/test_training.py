"""Training over several steps: it learns, is equal over ranks and stages, goes on from a checkpoint, and is exported.

So do an adapter (`learner.lora`) and a critic beside the policy.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.support.families import save_tiny
from tests.support.learner import assert_same_weights, job, run_ranks, save_tiny_model

pytestmark = pytest.mark.slow

STAGES = (0, 2, 3)
LORA = {"lora": {"rank": 4, "alpha": 8}}
KL = LORA | {"algorithm": {"kl_coef": 0.1}}
# Those with a schedule and mini-batches have most to remember.
RICH = {"mini_batches": 3, "schedule": "cosine", "grad_clip": 0.5}
BF16 = {"dtype": "bfloat16", "mini_batches": 2}


def critic(baseline: str = "critic", **settings: Any) -> dict[str, Any]:
    return {"algorithm": {"baseline": baseline}, "critic": {"gae_lambda": 0.9, "lr": 3e-3} | settings}


def halves(kind: str, model: str, folder: Path, steps: int, learner: dict[str, Any], **first: Any) -> dict[str, Any]:
    """Jobs that train at once, and with a stop after two steps; `first` is for the job that stops."""
    stopped = folder / f"{kind}halves"
    return {
        f"{kind}straight": job(model, folder / f"{kind}straight", steps, learner),
        f"{kind}first half": job(model, stopped, 2, learner, **{"save": [2]} | first),
        f"{kind}second half": job(model, stopped, steps, learner, load=True),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("alone")


@pytest.fixture(scope="module")
def mixture(folder):
    save_tiny(folder / "mixture", "Qwen3-MoE")
    return str(folder / "mixture")


@pytest.fixture(scope="module")
def alone(model, mixture, folder):
    """Jobs of one rank."""
    other = save_tiny_model(folder / "smaller", layers=1, seed=7)  # of the policy's vocabulary
    todo = {
        **halves("", model, folder, 4, RICH | {"warmup_steps": 2, "weight_decay": 0.01}, save=[1, 2]),
        **halves("bf16 ", model, folder, 4, BF16),
        **halves("adapter ", model, folder, 3, KL),
        **halves("critic ", model, folder, 4, critic() | RICH),
        **halves("bf16 critic ", model, folder, 4, critic("both", freeze_attention=True) | BF16),
        "bf16 stage 2": job(model, folder / "bf16", 4, BF16 | {"zero_stage": 2}),
        "drift": job(model, folder / "drift", 2, {"sampler": {"drift": {"mode": "ledger"}}}),
        "praised": job(model, folder / "praised", 4, {"lr": 3e-3}, advantage=1.0, repeat=True),
        "praised adapter": job(model, folder / "praised", 4, LORA | {"lr": 1e-2}, advantage=1.0, repeat=True),
        "all": job(model, folder / "all halves", 2, {}, save=[2]),
        "forged": job(model, folder / "forged", 1, {}, save=[1]),
        "read forged": job(model, folder / "forged", 0, {}, forged=1),
        "repeated": job(model, folder / "repeated", 8, critic(), repeat=True),
        "by turn": job(model, folder / "by turn", 1, critic(), turns=True),
        "of a mixture": job(mixture, folder / "of a mixture", 2, critic()),
        "tracker": job(model, folder / "tracker", 2, {}),
        "warming up": job(model, folder / "warming up", 2, critic(warmup_steps=2)),
        "both": job(model, folder / "both", 2, critic("both")),
        "small": job(model, folder / "small", 1, critic(model=other)),
        "other critic": job(model, folder / "critic halves", 0, critic(model=other), load=True, refused=True),
        "no critic": job(model, folder / "critic halves", 0, {}, load=True, refused=True),
        "no critic yet": job(model, folder / "tracker saved", 1, {}, save=[1]),
        "a critic later": job(model, folder / "tracker saved", 0, critic(), load=True, refused=True),
    }
    return run_ranks(1, todo, folder) | {"folder": folder}


@pytest.fixture(scope="module")
def pair(model, mixture, tmp_path_factory):
    """Jobs of two ranks, and of one that goes on from what they saved."""
    folder = tmp_path_factory.mktemp("pair")
    todo = halves("adapter ", model, folder, 3, KL | {"zero_stage": 3})
    for stage in STAGES:
        learner = {"zero_stage": stage, "grad_clip": 0.5}
        todo |= halves(f"{stage} ", model, folder, 3, learner, full=True)
        todo |= halves(f"mixture {stage} ", mixture, folder, 3, learner, full=True)
        if stage != 2:
            todo |= halves(f"critic {stage} ", model, folder, 3, critic() | learner)
    learner = {"zero_stage": 2, "grad_clip": 0.5}
    for kind, path in (("", model), ("mixture ", mixture)):
        todo[f"{kind}exact"] = job(path, folder / "exact", 3, learner | {"exact_every": 2}, age=1)
        todo[f"{kind}aged"] = job(path, folder / "exact", 3, learner, age=1)
    todo["fills up"] = job(model, folder / "fills up halves", 2, {"zero_stage": 2}, save=[1, 2], fills_up=20_000)
    for precision in ("float32", "bfloat16"):
        learner = {"zero_stage": 3, "dtype": precision, "algorithm": {"kl_coef": 0.1}}
        todo[f"{precision} in pieces"] = job(model, folder / f"{precision} halves", 2, learner, save=[2])
        todo[f"{precision} whole"] = job(model, folder / f"{precision} halves", 2, learner, whole=True)
    results = run_ranks(2, todo, folder)
    shutil.copytree(folder / "critic 3 halves", folder / "redivided")
    # With a learning rate of next to nothing a critic stays what it was when it was exported.
    exported = critic(model=str(step(folder, "critic 3 ") / "critic"), lr=1e-30, updates=1)
    redivided = critic() | {"zero_stage": 0, "grad_clip": 0.5}
    later = {
        "redivided": job(model, folder / "redivided", 3, redivided, load=True),
        "started": job(model, folder / "started", 1, exported),
    }
    return results | run_ranks(1, later, folder) | {"folder": folder}


def step(folder: Path, kind: str) -> Path:
    return folder / f"{kind}halves" / "default" / "checkpoints" / "step_2"


def names(folder: Path, kind: str) -> set[str]:
    return {path.name for path in step(folder, kind).parent.iterdir()}


def assert_same_models(run: dict[str, Any], expected: dict[str, Any], rtol: float = 0.0) -> None:
    """Two jobs have the same policy, and the same critic if they have one."""
    assert_same_weights(run, expected, rtol)
    assert ("critic" in run) == ("critic" in expected)
    if "critic" in expected:
        assert_same_weights(run["critic"], expected["critic"], rtol)


@pytest.mark.parametrize("kind", ["praised", "praised adapter"])
def test_training_raises_the_likelihood_of_what_is_praised(alone, kind):
    # E[log pi_rollout - log pi] over the same tokens: falls as the policy comes to favour them.
    gaps = [metrics["rollout_corr/kl"] for metrics in alone[kind]["metrics"]]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[0] - gaps[-1] > 0.1


@pytest.mark.parametrize("kind", ["", "bf16 ", "adapter ", "critic ", "bf16 critic "])
def test_a_resumed_run_has_the_weights_of_one_that_never_stopped(alone, kind):
    stopped, straight = alone[f"{kind}second half"], alone[f"{kind}straight"]
    assert stopped["loaded"] == 2
    assert_same_models(stopped, straight)
    assert ("critic" in straight) == ("critic" in kind)
    for ours, theirs in zip(stopped["metrics"], straight["metrics"][2:], strict=True):
        assert ours.get("critic/explained_variance") == theirs.get("critic/explained_variance")


OF_TWO = [*(f"{kind}{stage} " for kind in ("", "mixture ") for stage in STAGES), "critic 0 ", "critic 3 ", "adapter "]


@pytest.mark.parametrize("kind", OF_TWO)
def test_zero_stages_train_and_resume_to_the_same_weights(alone, pair, kind):
    straight = pair[f"{kind}straight"]
    assert pair[f"{kind}second half"]["loaded"] == 2
    assert_same_models(pair[f"{kind}second half"], straight)
    whole = alone["adapter straight"] if kind == "adapter " else pair[f"{kind[:-2]}0 straight"]
    assert_same_models(straight, whole, rtol=1e-3)


def test_another_number_of_ranks_goes_on_from_a_critics_checkpoint(pair):
    assert pair["redivided"]["loaded"] == 2
    assert_same_models(pair["redivided"], pair["critic 3 straight"], rtol=1e-3)


@pytest.mark.parametrize("kind", ["", "mixture "])
def test_scoring_by_past_versions_leaves_training_as_it_is(pair, kind):
    scored, plain = pair[f"{kind}exact"], pair[f"{kind}aged"]
    assert_same_weights(scored, plain)
    first, second, third = scored["metrics"]
    assert "exact/scored" not in second
    # Of the first batch, half the tokens are of a version before this process.
    assert 0.0 < first["exact/scored"] < third["exact/scored"] == pytest.approx(1.0 - third["exact/mixed"])
    assert first["exact/staleness_gap"] == 0.0
    assert 0.0 < third["exact/age_1/staleness_gap"] < third["exact/age_2/staleness_gap"]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_models_loaded_in_pieces_are_trained_to_the_same_bits(pair, precision):
    in_pieces, whole = pair[f"{precision} in pieces"], pair[f"{precision} whole"]
    assert_same_weights(in_pieces, whole)
    of_steps = ([step["actor/kl_loss"] for step in run["metrics"]] for run in (in_pieces, whole))
    assert next(of_steps) == next(of_steps)
    exported = step(pair["folder"], f"{precision} ") / "hf"
    for name, weight in AutoModelForCausalLM.from_pretrained(exported, dtype=precision).named_parameters():
        assert torch.equal(weight, whole["weights"][name]), name


def test_bfloat16_trains_in_every_step(model, alone):
    run = alone["bf16 straight"]
    original = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    for name, weight in original.named_parameters():
        assert run["weights"][name].dtype == torch.bfloat16
        assert not torch.equal(run["weights"][name], weight), name
    # Without sharding asked for, the same fp32 accumulation and master weights as with it.
    assert_same_weights(alone["bf16 stage 2"], run, rtol=1e-2)


def test_ledger_mode_measures_how_far_a_step_moved_the_policy(alone):
    assert all(metrics["actor/drift"] > 0 for metrics in alone["drift"]["metrics"])
    assert "actor/drift" not in alone["straight"]["metrics"][0]


def test_a_full_disk_is_an_error_on_all_ranks_and_loses_nothing(pair):
    for stage in STAGES:
        assert "MiB are free; earlier checkpoints are kept" in pair[f"{stage} first half"]["refused"]
        assert names(pair["folder"], f"{stage} ") == {"step_2"}
    # While a file is written, and on one rank alone.
    assert pair["fills up"]["refused"].startswith("rank 1: cannot write checkpoint")
    assert names(pair["folder"], "fills up ") == {"step_1", "step_2"}


def test_a_checkpoint_that_names_code_is_refused_and_runs_none(alone, folder):
    assert "cannot be read" in alone["read forged"]["refused"]
    assert not list(folder.glob("*.ran"))


@pytest.mark.parametrize("stage", [0, 3])
def test_the_export_is_a_plain_model_with_the_trained_weights(model, pair, stage):
    made = step(pair["folder"], f"{stage} ")
    assert json.loads((made / "checkpoint.json").read_text())["version"] == 2
    assert len({file.stat().st_mode for file in (made / "hf").iterdir()}) == 1
    exported, original = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (made / "hf", model)
    )
    assert exported.lm_head.weight is exported.model.embed_tokens.weight
    ids = torch.arange(12)[None]
    assert exported(ids).logits.shape == original(ids).logits.shape
    assert not torch.equal(exported(ids).logits, original(ids).logits)


@pytest.mark.parametrize("stage", [0, 3])
def test_the_export_of_a_mixture_is_named_as_its_files_are(mixture, pair, stage):
    made = step(pair["folder"], f"mixture {stage} ")
    exported, original = (load_file(Path(folder, "model.safetensors")) for folder in (made / "hf", mixture))
    shapes, own = ({name: weight.shape for name, weight in files.items()} for files in (exported, original))
    assert shapes == own
    trained = pair[f"mixture {stage} first half"]["weights"]
    assert all(torch.equal(exported[name], weight) for name, weight in trained.items())
    loaded = dict(AutoModelForCausalLM.from_pretrained(made / "hf").named_parameters())
    # A layer's experts are one tensor, in which each expert's gate comes before its other half.
    gates = loaded["model.layers.1.mlp.experts.gate_up_proj"].chunk(2, dim=1)[0]
    assert torch.equal(gates[5], trained["model.layers.1.mlp.experts.5.gate_proj.weight"])


def test_a_checkpoint_does_not_hold_the_base_model_again(alone, folder, model):
    adapter, everything = (
        sum(path.stat().st_size for path in (step(folder, kind) / "deepspeed").iterdir())
        for kind in ("adapter ", "all ")
    )
    assert adapter < (Path(model) / "model.safetensors").stat().st_size < everything


@pytest.mark.parametrize("ranks", ["alone", "pair"])
def test_penalty_and_export_are_of_base_model_and_adapter(request, model, ranks):
    runs = request.getfixturevalue(ranks)
    kl = [metrics["actor/kl_loss"] for metrics in runs["adapter straight"]["metrics"]]
    assert kl[0] == pytest.approx(0, abs=1e-7)
    assert kl[2] > kl[1] > 1e-5
    checkpoint = step(runs["folder"], "adapter ")
    adapter = load_file(checkpoint / "adapter" / "adapter_model.safetensors")
    for name, weight in runs["adapter first half"]["weights"].items():
        assert torch.equal(adapter[name], weight), name
    base, merged = (AutoModelForCausalLM.from_pretrained(path) for path in (model, checkpoint / "hf"))
    ids = torch.arange(30)[None]
    with torch.no_grad():
        before = base(ids).logits
        beside = PeftModel.from_pretrained(base, checkpoint / "adapter")(ids).logits
        torch.testing.assert_close(merged(ids).logits, beside, rtol=1e-4, atol=1e-4)
    assert (beside - before).abs().max() > 0.01


def test_a_critic_learns_the_returns_of_what_it_sees_again(alone):
    explained = [metrics["critic/explained_variance"] for metrics in alone["repeated"]["metrics"]]
    losses = [metrics["critic/loss"] for metrics in alone["repeated"]["metrics"]]
    assert explained[0] == pytest.approx(0.0, abs=1e-6), "a head of zeros tells nothing"
    assert explained[-1] > 0.5
    assert losses[-1] < losses[0] / 2


def test_the_values_begin_at_the_middle_or_at_the_trackers(alone):
    assert alone["critic straight"]["metrics"][0]["critic/value_mean"] == 0.5
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
    now = alone["bf16 critic straight"]["critic"]["weights"]
    assert now["score.weight"].abs().max() > 0
    attention = [name for name in now if "self_attn" in name]
    assert attention
    assert all(torch.equal(now[name], start[name]) for name in attention)
    assert not torch.equal(now["model.layers.1.mlp.up_proj.weight"], start["model.layers.1.mlp.up_proj.weight"])


def test_an_exported_critic_is_one_to_start_from(pair):
    exported = load_file(step(pair["folder"], "critic 3 ") / "critic" / "model.safetensors")
    trained = pair["critic 3 first half"]["critic"]
    assert all(torch.equal(exported[name], weight) for name, weight in trained["weights"].items())
    assert_same_weights(pair["started"]["critic"], trained)


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
