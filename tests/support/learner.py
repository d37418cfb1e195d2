"""Tiny models, payloads and ranks for the learner's tests."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from common.config import Config, parse_config
from common.messages import Batch
from common.payload import Payload
from learner.batch.demonstrations import Demonstration
from learner.batch.layout import Layout
from learner.batch.outcome import Advantage, CriticTarget
from learner.batch.plan import plan_micro_batches
from learner.batch.tensors import MicroBatch, Packer, RolloutBatch
from learner.policy.attention import pack_sequences
from learner.policy.model import Policy, load_policy
from learner.ranks.world import World
from tests.support.ranks import on_ranks

VOCABULARY = 97
PACKER = Packer(VOCABULARY)
ALONE = World(0, 1, torch.device("cpu"))
# Made-up log-probs are so far from the model's that the recommended correction would reject them all.
KEEPS_ALL: dict[str, Any] = {"correction": {"preset": "decoupled_token_is"}}
# Defaults of a job of the rank program.
JOB: dict[str, Any] = {"samples": 12, "seed": 3, "steps": 1, "learner": {}}
DEMONSTRATIONS = 5  # of the file that `algorithm.demonstrations` of a job names
SECTIONS = ("algorithm", "critic", "sampler", "generator", "run", "broker", "teacher")
# By default DeepSpeed keeps a billion gathered parameters, which are all of a model as small as this.
LIMITS = ("max_live_parameters", "max_reuse_distance", "prefetch_bucket_size", "param_persistence_threshold")
NOTHING_KEPT = {"zero_optimization": {f"stage3_{name}": 1 for name in LIMITS}}
RANK_MODULE = "tests.integration.learner.rank_program"


def save_tiny_model(folder: Path | str, *, hidden: int = 64, layers: int = 2, tied: bool = True, seed: int = 0) -> str:
    """A random Qwen3, as a folder that `from_pretrained` reads."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        vocab_size=VOCABULARY,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        # Wider than the usual initialisation, so that tokens differ and gradients are not vanishing.
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    model.save_pretrained(folder)
    return str(folder)


def learner_config(model: str, output: Path | str, **learner: Any) -> Config:
    """A configuration for the tiny model; those named like `SECTIONS` replace these."""
    tree: dict[str, dict[str, Any]] = {
        "model": {"path": model, "dtype": "float32", "max_model_len": 128},
        "data": {"train": "none.jsonl", "max_prompt_tokens": 64},
        "run": {"output_dir": str(output), "steps": 8},
        "sampler": {"batch_size": 12, "drift": {"mode": "constant"}},
        "algorithm": KEEPS_ALL,
    }
    for name in SECTIONS:
        tree[name] = tree.get(name, {}) | learner.pop(name, {})
    learner = {"dtype": "float32", "lr": 1e-3, "token_budget": 256, "grad_clip": 0.0, "checkpoint_every": 2} | learner
    return parse_config(tree | {"learner": learner})


def policy_of(path: Path | str, weights: bool = True, **sections: Any) -> Policy:
    """The policy that a model folder gives under `learner_config`."""
    return load_policy(learner_config(str(path), "runs", **sections), weights)


def make_payload(rng: np.random.Generator, length: int, version: int = 0) -> Payload:
    """A two-turn episode: prompt, model tokens, three tokens of a tool, model tokens."""
    prompt = int(rng.integers(2, max(3, length // 3)))
    middle = (prompt + length) // 2
    spans = np.array([[prompt, middle], [min(middle + 3, length - 1), length]], np.int32)
    sampled = int((spans[:, 1] - spans[:, 0]).sum())
    half = sampled // 2
    return Payload(
        rng.integers(0, VOCABULARY, length).astype(np.int32),
        spans,
        (-4 - rng.random(sampled)).astype(np.float32),
        np.array([[max(0, version - 1), 0, half], [version, half, sampled]], np.int32),
    )


def with_experts(payload: Payload, layers: int, chosen: int, experts: int) -> Payload:
    """A payload of one row whose tokens, but for the last, went through any experts."""
    rng, told = np.random.default_rng(len(payload.token_ids)), len(payload.token_ids) - 1
    ids = rng.permuted(np.tile(np.arange(experts, dtype=np.uint8), (told, layers, 1)), axis=-1)[..., :chosen]
    return replace(payload, experts=ids, expert_lengths=np.array([told], np.int32))


def with_scores(payload: Payload, top_k: int) -> Payload:
    """A payload scored by a teacher: its own tokens, or any K others in their place."""
    rng, sampled = np.random.default_rng(len(payload.token_ids)), len(payload.logprobs)
    if not top_k:
        return replace(payload, teacher_logprobs=(-4 - rng.random((sampled, 1))).astype(np.float32))
    ids = rng.permuted(np.tile(np.arange(VOCABULARY, dtype=np.int32), (sampled, 1)), axis=1)[:, :top_k]
    logprobs = np.log(rng.dirichlet(np.ones(top_k + 1), sampled)[:, :top_k]).astype(np.float32)
    return replace(payload, teacher_logprobs=logprobs, teacher_ids=ids)


def make_demonstrations(count: int) -> list[Demonstration]:
    """Demonstrations of two turns, the tokens of which have three weights."""
    rng = np.random.default_rng(0)
    made = []
    for length in rng.integers(9, 40, count).tolist():
        ids = rng.integers(0, VOCABULARY, length).astype(np.int32)
        made.append(Demonstration.of_spans(ids, [(2, 5, 1.0), (5, 6, 0.25), (7, length, 2.0)]))
    return made


def joined(rows: Sequence[Payload]) -> Payload:
    """A sample of these rows."""
    tokens = np.cumsum([0, *(len(row.token_ids) for row in rows)])
    sampled = np.cumsum([0, *(len(row.logprobs) for row in rows)])
    before = [np.array([0, start, start], np.int32) for start in sampled[:-1]]
    return Payload(
        np.concatenate([row.token_ids for row in rows]),
        np.concatenate([row.model_spans + start for row, start in zip(rows, tokens[:-1], strict=True)]),
        np.concatenate([row.logprobs for row in rows]),
        np.concatenate([row.version_spans + starts for row, starts in zip(rows, before, strict=True)]),
        np.diff(tokens).astype(np.int32),
    )


def make_samples(
    count: int, seed: int = 0, version: int = 0, lengths: Sequence[int] = (9, 60)
) -> tuple[list[Payload], list[float]]:
    """Payloads of uneven lengths, from the first of `lengths` to below the second, and their advantages."""
    rng = np.random.default_rng(seed)
    payloads = [make_payload(rng, int(length), version) for length in rng.integers(*lengths, count)]
    return payloads, rng.normal(size=count).tolist()


def tokens_of_rows(
    lengths: list[int],
    rollout: torch.Tensor,
    advantages: torch.Tensor,
    versions: torch.Tensor | None = None,
    shares: list[float] | None = None,
) -> MicroBatch:
    """Model tokens [N] of rows of these lengths, without what the model would read; of version 0 by default."""
    nothing = torch.zeros(1, 0, dtype=torch.int64)
    return MicroBatch(
        input_ids=nothing,
        position_ids=nothing,
        sequences=pack_sequences(lengths),
        predict=nothing[0],
        targets=nothing[0],
        layout=Layout.of_lengths(lengths, shares=shares),
        rollout_logprobs=rollout,
        advantages=advantages,
        versions=torch.zeros(len(rollout), dtype=torch.int64) if versions is None else versions,
    )


def make_batch(
    config: Config,
    payloads: list[Payload | None],
    advantages: Sequence[Advantage],
    *,
    version: int = 0,
    rank: int = 0,
    ranks: int = 1,
    packer: Packer = PACKER,
    critic: Sequence[CriticTarget] | None = None,
) -> RolloutBatch:
    """One rank's share of a batch of payloads."""
    row_tokens = [[len(row.token_ids) for row in payload.rows()] if payload else [20] for payload in payloads]
    learner = config.learner
    places = plan_micro_batches(row_tokens, learner.mini_batches, ranks, learner.token_budget).of_rank(rank)
    mine = {index: payloads[index] for micros in places for held in micros for index, _ in held}
    rewards = [0.5] * len(payloads)
    return packer.rollout_batch(version, places, mine, advantages, rewards, critic=critic)


def manifest(samples: Sequence[str], tokens: Sequence[int], **columns: Any) -> Batch:
    """The message of a batch of these samples; advantages and rewards are 0 by default."""
    zeros = [0.0] * len(samples)
    return Batch(
        **{"batch_id": 4, "sample_ids": [*samples], "tokens": [*tokens], "advantages": zeros, "rewards": zeros}
        | columns
    )


def job_critic(job: dict[str, Any], version: int) -> list[CriticTarget]:
    """What a critic learns from the batch that a job trains on at `version`: rewards of 0 and 1, values between."""
    payloads, advantages = job_batch(job, version)
    rewards = [float(payload.token_ids[0] % 2) for payload in payloads]
    returns = [[reward, reward / 2] if job.get("turns") else reward for reward in rewards]
    values = np.linspace(0.25, 0.75, len(advantages)).tolist()
    return [CriticTarget(*one) for one in zip(returns, values, strict=True)]


def job_batch(job: dict[str, Any], version: int) -> tuple[list[Payload], Sequence[Advantage]]:
    """Payloads and advantages that a job of the rank program trains on at `version`.

    Its keys: samples, seed, repeat, advantage; rows: each sample has one to three rows; turns: each sample's second
    turn has an advantage of its own; age: how many versions before this one the tokens were made; far: `{version:
    indices}` of samples, or "all", that the generating policy found next to impossible, so that a correction with any
    bound rejects them; infinite: `{version: indices}` of samples whose advantage is infinite; lengths: see
    `make_samples`; experts: layers, experts a token and experts of a layer, of which each token but a row's last has
    some; taught: `teacher.top_k`, every second sample has a teacher's scores.
    """
    seed, made = job["seed"] + version * (not job.get("repeat")), version - job.get("age", 0)
    payloads, advantages = make_samples(job["samples"], seed, made, job.get("lengths", (9, 60)))
    if "experts" in job:
        payloads = [with_experts(payload, *job["experts"]) for payload in payloads]
    far = job.get("far", {}).get(str(version), [])
    for index in range(len(payloads)) if far == "all" else far:
        payloads[index] = replace(payloads[index], logprobs=payloads[index].logprobs - np.float32(40))
    for index in job.get("infinite", {}).get(str(version), []):
        advantages[index] = np.inf
    if job.get("rows"):
        sizes = [1 + i % 3 for i in range(len(payloads) // 2)]
        ends = np.cumsum(sizes).tolist()
        payloads = [joined(payloads[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
        advantages = advantages[: len(payloads)]
    if "taught" in job:
        payloads[::2] = [with_scores(payload, job["taught"]) for payload in payloads[::2]]
    if job.get("turns"):
        return payloads, [[advantage, 0.5 - advantage] for advantage in advantages]
    return payloads, [job["advantage"]] * len(payloads) if "advantage" in job else advantages


def without_export(checkpoint: Path, copy: Path) -> Path:
    """A copy of a checkpoint as it is if `learner.export` is off."""
    shutil.copytree(checkpoint, copy, ignore=shutil.ignore_patterns("hf"))
    metadata = json.loads((copy / "checkpoint.json").read_text())
    metadata["files"] = {name: entry for name, entry in metadata["files"].items() if not name.startswith("hf/")}
    (copy / "checkpoint.json").write_text(json.dumps(metadata))
    return copy


class Call:
    """Pickles as a call, which unpickling makes."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call

    def __call__(self) -> None:
        """An object that is pickled as a function must be callable."""


def assert_same_weights(run: dict[str, Any], expected: dict[str, Any], rtol: float = 0.0) -> None:
    """The results of two jobs of the rank program have the same weights."""
    assert run["weights"].keys() == expected["weights"].keys()
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(run["weights"][name], weight, rtol=rtol, atol=rtol / 10)


def job(model: str, folder: Path, steps: int, learner: dict[str, Any], **others: Any) -> dict[str, Any]:
    """A job of `run_ranks` in a folder of its own, which is made; `learner` is that section, and what else it names."""
    folder.mkdir(exist_ok=True)
    return {"model": model, "folder": str(folder), "steps": steps, "learner": learner} | others


def run_ranks(count: int, jobs: dict[str, dict[str, Any]], folder: Path) -> dict[str, dict[str, Any]]:
    """Do named jobs of the rank program on `count` ranks; returns what each left, or fails with their output."""
    listed = [{**JOB, "folder": str(folder), **job, "out": str(folder / f"{name}.pt")} for name, job in jobs.items()]
    on_ranks(count, _do_jobs, listed, folder=folder)
    return {name: torch.load(folder / f"{name}.pt") for name in jobs}


def _do_jobs(world: Any, jobs: list[dict[str, Any]]) -> None:
    for job in jobs:
        import_module(RANK_MODULE).work(job, world)
