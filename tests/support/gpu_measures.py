"""The measurements of `make test-gpu`, on any device: with `--on-cpu` the same code runs on tiny models."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.generator import RESPONSE, bare, engine_rate
from benchmarks.learner import make_batch
from common.config import Config, WeightsConfig, parse_config
from common.log import get_logger
from generator.engine.engine import Engine
from launcher.quickstart.tiny_model import build_tokenizer, save
from learner.policy.attention import pack_sequences
from learner.policy.disk_names import DiskNames
from learner.policy.model import load_policy
from learner.publish.weight_server import WeightServer
from learner.ranks import world as ranks
from learner.trainer import Trainer
from tests.support.engine import shared
from tests.support.families import save_tiny
from tests.support.whole_run import json_lines, spo

COPIES = 4  # versions that are copied; the first pays for memory
UPDATES = 3  # of an engine's weights
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Shape:
    """A model with random weights, and how much is done with it.

    Attributes:
        vocabulary: number of token ids; 0 means those of the quickstart's tokenizer.
        requests: of a generator at once.
        waves: of requests, by which its rate is measured.
        eager: whether vLLM compiles nothing.
        family: settings of the shape of other families' models.
        peak: operations a second, taken for those of a card that has none.
    """

    hidden: int = 2048
    layers: int = 28
    heads: int = 16
    vocabulary: int = 151_936
    samples: int = 64
    tokens: int = 1024
    steps: int = 8
    requests: int = 128
    waves: int = 2
    eager: bool = False
    family: tuple[tuple[str, int], ...] = (
        ("hidden_size", 256), ("intermediate_size", 512), ("moe_intermediate_size", 128), ("num_attention_heads", 4),
        ("num_key_value_heads", 2), ("head_dim", 64),
    )  # fmt: skip
    peak: float = 0.0

    @property
    def prompts(self) -> list[list[int]]:
        return [np.random.default_rng(seed).integers(0, 256, 32).tolist() for seed in range(8)]


TINY = Shape(
    hidden=128, layers=2, heads=2, vocabulary=8192, samples=8, tokens=32, steps=2, requests=8, waves=1, family=(),
    peak=1e12,
)  # fmt: skip


@dataclass(frozen=True)
class Figures:
    """Figures in a file of JSON lines, written as they come, so that a run that is cut off leaves those it had."""

    path: Path

    def add(self, name: str, figure: float) -> float:
        card = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"name": name, "figure": figure, "card": card, "torch": torch.__version__}) + "\n")
        return figure

    def read(self) -> dict[str, float]:
        """All figures so far; the last one of each name."""
        return {line["name"]: line["figure"] for line in json_lines(self.path)} if self.path.exists() else {}


def save_model(folder: Path, shape: Shape, seed: int = 0) -> None:
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
        vocab_size=shape.vocabulary or len(tokenizer),
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.device(DEVICE):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    save(model.cpu().eval(), tokenizer, folder)


def configuration(model: Path, folder: Path, shape: Shape, **sections: dict[str, Any]) -> Config:
    settings: dict[str, dict[str, Any]] = {
        "run": {"steps": 1000, "output_dir": str(folder)},
        "model": {"path": str(model), "dtype": "bfloat16", "max_model_len": max(2 * shape.tokens, RESPONSE) + 64},
        "data": {"train": "none.jsonl", "max_prompt_tokens": 32},
        "sampler": {"batch_size": shape.samples},
        "learner": {"dtype": "bfloat16", "lr": 1e-6, "token_budget": 8 * shape.tokens, "gradient_checkpointing": True},
        "algorithm": {"correction": {"preset": "decoupled_token_is"}},
        "generator": {"max_concurrency": shape.requests, "engine": engine_settings(shape)},
    }
    for name, section in sections.items():
        settings[name] = settings.get(name, {}) | section
    return parse_config(settings)


def engine_settings(shape: Shape) -> dict[str, Any]:
    """Settings that leave room for the learner on a GPU.

    The cache has a fixed size: vLLM would count memory that the learner takes while vLLM measures as its own, and find
    no room left for a cache.
    """
    if not torch.cuda.is_available():
        return {}
    return {"gpu_memory_utilization": 0.3, "kv_cache_memory_bytes": 6 << 30, "enforce_eager": shape.eager}


def learner_measures(model: Path, folder: Path, shape: Shape, figures: Figures) -> None:
    """Tokens a second of training, MFU, memory, and seconds to copy and to publish a version."""
    world = ranks.start()
    config = configuration(model, folder, shape)
    trainer = Trainer(config, world)
    trainer.peak = trainer.peak or shape.peak
    batches = [make_batch(config, shape.samples, shape.tokens, seed, world.device) for seed in range(shape.steps + 1)]
    trainer.train(batches[0])
    _wait(world.device)
    started = time.perf_counter()
    steps = [trainer.train(batch) for batch in batches[1:]]
    _wait(world.device)
    figures.add("learner tokens/s", sum(step["tokens/total"] for step in steps) / (time.perf_counter() - started))
    if trainer.peak:
        figures.add("learner MFU", statistics.mean(step["gpu/mfu"] for step in steps))
    if world.device.type == "cuda":
        figures.add("learner peak GB", torch.cuda.max_memory_allocated() / 1e9)
    _copy_measures(trainer, figures)
    trainer.engine.destroy()


def _copy_measures(trainer: Trainer, figures: Figures) -> None:
    """Seconds that training waits for a copy of the weights, and until it is served; the first copy's apart."""
    server, device = WeightServer(WeightsConfig()), trainer.world.device
    copies, served = [], []
    try:
        for version in range(COPIES):
            started = time.perf_counter()
            copy = server.copy(version, trainer.weights(), torch.bfloat16, device=device)
            copies.append(time.perf_counter() - started)
            server.serve(copy)
            served.append(time.perf_counter() - started)
            if not version:
                figures.add("first copy seconds", copies[0])
                figures.add("first publish seconds", served[0])
    finally:
        server.close()
    figures.add("copy seconds", statistics.median(copies[1:]))
    figures.add("publish seconds", statistics.median(served[1:]))


def rate_measures(model: Path, folder: Path, shape: Shape, figures: Figures) -> None:
    """Sampled tokens a second of the engine, and of vLLM by itself with the same arguments."""
    config = configuration(model, folder, shape)
    figures.add("bare AsyncLLM tokens/s", asyncio.run(bare(config, shape.waves))["rate"])

    async def act() -> None:
        engine = await Engine.start(config, get_logger())
        try:
            figures.add("engine tokens/s", await engine_rate(engine, shape.requests, shape.waves))
        finally:
            await engine.close()

    asyncio.run(act())


def update_measures(model: Path, folder: Path, shape: Shape, figures: Figures, prefix: str = "") -> None:
    """Gap of log-probs between engine and learner in bfloat16 before and after updates, and the pauses of loads."""
    config = configuration(model, folder, shape)
    policy = load_policy(config).to(DEVICE).eval()

    async def act() -> None:
        engine = await Engine.start(config, get_logger())
        try:
            figures.add(f"{prefix}log-prob gap", await _gap(engine, policy, shape))
            for update in range(UPDATES):
                _move(policy, update)
                if not update:
                    figures.add(f"{prefix}gap with old weights", await _gap(engine, policy, shape))
                here = ((name, parameter.detach().cpu()) for name, parameter in policy.model.named_parameters())
                weights = shared(2 * update + 1, DiskNames(policy.model).of(here), torch.bfloat16)
                # The same memory twice, as in a run: it is mapped and pinned only once.
                pauses = [await engine.load(version, weights) for version in (2 * update + 1, 2 * update + 2)]
                weights.close()
                figures.add(f"{prefix}gap after update {update + 1}", await _gap(engine, policy, shape))
            figures.add(f"{prefix}first load of memory, pause s", pauses[0])
            figures.add(f"{prefix}load, pause s", pauses[1])
        finally:
            await engine.close()

    asyncio.run(act())


def family_measures(family: str, folder: Path, shape: Shape, figures: Figures) -> None:
    """The same for a tiny model of another family."""
    save_tiny(folder / "model", family, **dict(shape.family))
    update_measures(folder / "model", folder, shape, figures, f"{family}: ")


def policy_and_batch(model: Path, folder: Path, shape: Shape, **learner: Any) -> tuple[Any, tuple[Any, ...]]:
    """The policy, and a micro-batch of four samples that it can be called with."""
    config = configuration(model, folder, shape, learner=learner)
    micro = make_batch(config, 4, shape.tokens, seed=0, device=DEVICE).mini_batches[0][0]
    arguments = (micro.input_ids, micro.position_ids, micro.sequences, micro.predict, micro.targets)
    return load_policy(config).to(DEVICE), arguments


def run_measures(model: Path, folder: Path, redis_url: str, shape: Shape, cards: str, figures: Figures) -> None:
    """A whole `spo run` to its end on cards (`CUDA_VISIBLE_DEVICES`), with one generator; its seconds, and its GPUs."""
    rows = [json.dumps({"prompt": f"What is {i}+1=", "answer": str(i + 1)}) for i in range(64)]
    (folder / "train.jsonl").write_text("\n".join(rows))
    settings = configuration(
        model,
        folder,
        shape,
        run={"steps": shape.steps, "name": "gpus", "experiment": "gpus"},
        data={"train": str(folder / "train.jsonl")},
        episode={"max_response_tokens": shape.tokens},
        broker={"url": redis_url},
    ).model_dump(mode="json")
    path = folder / "gpus.yaml"
    path.write_text(yaml.safe_dump(settings))
    ran = spo("run", path, "--plain", "--generators", 1, "--redis", redis_url, timeout=300, CUDA_VISIBLE_DEVICES=cards)
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-3000:]
    lines = [line for line in json_lines(folder / "gpus" / "metrics.jsonl") if "time" in line]
    times = sorted(line["time"] for line in lines)
    figures.add(f"GPU {cards}: seconds of {shape.steps} steps", times[-1] - times[0])
    for name in ("gpu/utilisation", "gpu/memory_gb", "gpu/watts", "gpu/mfu", "engine/batch_size", "engine/cache_used"):
        if values := [line["values"][name] for line in lines if name in line["values"]]:
            figures.add(f"GPU {cards}: largest {name}", max(values))


async def _gap(engine: Engine, policy: Any, shape: Shape) -> float:
    """Mean |difference| of sampled tokens' log-probs."""
    tokens = min(shape.tokens, RESPONSE)
    answers = await asyncio.gather(*(engine.generate(prompt, max_tokens=tokens) for prompt in shape.prompts))
    gaps = []
    for prompt, answer in zip(shape.prompts, answers, strict=True):
        ids = torch.tensor([*prompt, *answer.token_ids.tolist()], device=DEVICE)
        predict = torch.arange(len(prompt) - 1, len(ids) - 1, device=DEVICE)
        positions = torch.arange(len(ids), device=DEVICE)[None]
        with torch.no_grad():
            logprobs, _ = policy(ids[None], positions, pack_sequences([len(ids)], DEVICE), predict, ids[predict + 1])
        gaps.append(np.abs(logprobs.cpu().numpy() - answer.logprobs).mean())
    return float(np.mean(gaps))


@torch.no_grad()
def _move(policy: Any, update: int) -> None:
    """Change all matrices as much as can be seen, there and back."""
    for parameter in policy.model.parameters():
        if parameter.ndim > 1:
            parameter.mul_(0.8 if update % 2 else 1.25)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
