"""The measurements of `make test-gpu`, on any device: the CPU tests run the same code on a tiny model."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.learner import make_batch
from common.config import Config, WeightsConfig, parse_config
from common.log import get_logger
from generator.engine.engine import Engine
from launcher.quickstart.tiny_model import build_tokenizer, save
from learner.policy.attention import pack_sequences
from learner.policy.model import load_policy
from learner.publish.weight_server import WeightServer
from learner.ranks import world as ranks
from learner.trainer import Trainer
from tests.support.engine import shared
from tests.support.whole_run import json_lines, spo

# Dense bfloat16 operations a second of a card, by a part of its name.
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40": 181e12, "4090": 165e12}


@dataclass(frozen=True)
class Shape:
    """A model with random weights, and how much is trained with it."""

    hidden: int = 2048
    layers: int = 28
    heads: int = 16
    samples: int = 64
    tokens: int = 1024
    steps: int = 8

    @property
    def prompts(self) -> list[list[int]]:
        return [np.random.default_rng(seed).integers(0, 256, 32).tolist() for seed in range(8)]


TINY = Shape(hidden=128, layers=2, heads=2, samples=8, tokens=32, steps=2)


def save_model(folder: Path, shape: Shape, seed: int = 0) -> Qwen3ForCausalLM:
    """Write a random Qwen3 in bfloat16, with the quickstart's tokenizer."""
    torch.manual_seed(seed)
    tokenizer = build_tokenizer()
    config = Qwen3Config(
        hidden_size=shape.hidden,
        intermediate_size=3 * shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=max(1, shape.heads // 2),
        head_dim=shape.hidden // shape.heads,
        vocab_size=len(tokenizer),
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = Qwen3ForCausalLM(config).to(torch.bfloat16).eval()
    save(model, tokenizer, folder)
    return model


def configuration(model: Path, folder: Path, shape: Shape, **sections: dict[str, Any]) -> Config:
    settings: dict[str, dict[str, Any]] = {
        "run": {"steps": 1000, "output_dir": str(folder)},
        "model": {"path": str(model), "dtype": "bfloat16", "max_model_len": 2 * shape.tokens + 64},
        "data": {"train": "none.jsonl", "max_prompt_tokens": 32},
        "sampler": {"batch_size": shape.samples},
        "learner": {"dtype": "bfloat16", "lr": 1e-6, "token_budget": 8 * shape.tokens, "gradient_checkpointing": True},
        "algorithm": {"correction": {"preset": "decoupled_token_is"}},
        "generator": {"max_concurrency": 16},
    }
    for name, section in sections.items():
        settings[name] = settings.get(name, {}) | section
    return parse_config(settings)


def learner_measures(model: Path, folder: Path, shape: Shape) -> dict[str, float]:
    """Tokens a second of training, the share of the card's operations, and seconds to publish a version."""
    world = ranks.start()
    config = configuration(model, folder, shape)
    trainer = Trainer(config, world)
    batches = [make_batch(config, shape.samples, shape.tokens, seed, world.device) for seed in range(shape.steps + 1)]
    trainer.train(batches[0])
    _wait(world.device)
    started = time.perf_counter()
    tokens = sum(trainer.train(batch)["tokens/total"] for batch in batches[1:])
    _wait(world.device)
    rate = tokens / (time.perf_counter() - started)
    measures = {"learner tokens/s": rate}
    if world.device.type == "cuda":
        parameters = sum(parameter.numel() for parameter in trainer.policy.parameters())
        name = torch.cuda.get_device_name(world.device)
        peak = next((flops for card, flops in PEAK_FLOPS.items() if card in name), None)
        if peak:
            measures["learner MFU"] = 6 * parameters * rate / peak
        measures["learner peak GB"] = torch.cuda.max_memory_allocated() / 1e9
    server = WeightServer(WeightsConfig())
    try:
        for version in range(2):
            started = time.perf_counter()
            copy = server.copy(version, trainer.weights(), torch.bfloat16, device=world.device)
            measures["copy seconds"] = time.perf_counter() - started  # training waits this long
            server.serve(copy)
            measures["publish seconds"] = time.perf_counter() - started
    finally:
        server.close()
    trainer.engine.destroy()
    return measures


def engine_measures(model: Path, folder: Path, shape: Shape) -> dict[str, float]:
    """Gap of log-probs between engine and learner in bfloat16 before and after an update, and the pause of a load."""
    config = configuration(model, folder, shape, generator={"engine": engine_settings()})
    policy = load_policy(config).to("cuda" if torch.cuda.is_available() else "cpu").eval()
    with torch.no_grad():
        changed = [(name, parameter.detach().cpu() * 1.25) for name, parameter in policy.model.named_parameters()]

    async def act() -> dict[str, float]:
        engine = await Engine.start(config, get_logger())
        try:
            before = await _gap(engine, policy, shape)
            weights = shared(1, changed, torch.bfloat16)
            # The same memory twice, as in a run: it is mapped and pinned only once.
            pauses = [await engine.load(1, weights), await engine.load(2, weights)]
            weights.close()
            stale = await _gap(engine, policy, shape)
            with torch.no_grad():
                for (_, parameter), (_, value) in zip(policy.model.named_parameters(), changed, strict=True):
                    parameter.copy_(value)
            after = await _gap(engine, policy, shape)
        finally:
            await engine.close()
        gaps = {"log-prob gap": before, "after an update": after, "with old weights": stale}
        return gaps | {"first load, pause s": pauses[0], "load pause s": pauses[1]}

    return asyncio.run(act())


def policy_and_batch(model: Path, folder: Path, shape: Shape, **learner: Any) -> tuple[Any, tuple[Any, ...]]:
    """The policy, and a micro-batch of four samples that it can be called with."""
    config = configuration(model, folder, shape, learner=learner)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    micro = make_batch(config, 4, shape.tokens, seed=0, device=device).mini_batches[0][0]
    arguments = (micro.input_ids, micro.position_ids, micro.sequences, micro.predict, micro.targets)
    return load_policy(config).to(device), arguments


async def _gap(engine: Engine, policy: Any, shape: Shape) -> float:
    """Mean |difference| of sampled tokens' log-probs."""
    answers = await asyncio.gather(*(engine.generate(prompt, max_tokens=shape.tokens) for prompt in shape.prompts))
    device = next(policy.parameters()).device
    gaps = []
    for prompt, answer in zip(shape.prompts, answers, strict=True):
        ids = torch.tensor([*prompt, *answer.token_ids.tolist()], device=device)
        predict = torch.arange(len(prompt) - 1, len(ids) - 1, device=device)
        positions = torch.arange(len(ids), device=device)[None]
        with torch.no_grad():
            logprobs, _ = policy(ids[None], positions, pack_sequences([len(ids)], device), predict, ids[predict + 1])
        gaps.append(np.abs(logprobs.cpu().numpy() - answer.logprobs).mean())
    return float(np.mean(gaps))


def engine_settings() -> dict[str, Any]:
    """Settings that leave room for the learner on a GPU.

    The cache has a fixed size: vLLM would count memory that the learner takes while vLLM measures as its own, and find
    no room left for a cache.
    """
    return {"gpu_memory_utilization": 0.3, "kv_cache_memory_bytes": 4 << 30} if torch.cuda.is_available() else {}


def run_measures(model: Path, folder: Path, redis_url: str, shape: Shape, cards: str) -> dict[str, float]:
    """A whole `spo run` to its end on cards (`CUDA_VISIBLE_DEVICES`), with one generator; its seconds."""
    rows = [json.dumps({"prompt": f"What is {i}+1=", "answer": str(i + 1)}) for i in range(64)]
    (folder / "train.jsonl").write_text("\n".join(rows))
    settings = configuration(
        model,
        folder,
        shape,
        run={"steps": shape.steps, "name": "gpus", "experiment": "gpus"},
        data={"train": str(folder / "train.jsonl")},
        generator={"engine": engine_settings(), "max_concurrency": 16},
        episode={"max_response_tokens": shape.tokens},
        broker={"url": redis_url},
    ).model_dump(mode="json")
    path = folder / "gpus.yaml"
    path.write_text(yaml.safe_dump(settings))
    ran = spo("run", path, "--plain", "--generators", 1, "--redis", redis_url, timeout=1500, CUDA_VISIBLE_DEVICES=cards)
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-3000:]
    times = sorted(line["time"] for line in json_lines(folder / "gpus" / "metrics.jsonl") if "time" in line)
    return {"run steps": float(shape.steps), "run seconds": times[-1] - times[0]}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
