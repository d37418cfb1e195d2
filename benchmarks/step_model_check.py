"""`benchmarks.step_model` beside what is measured on this machine's CPU: calibrated at some sizes, checked at others.

The share of the peak that training achieves is taken from samples of 512 tokens, and the overheads of an engine's step
from 8 and 256 requests at a time; the model then has to predict the rest. Times are CPU times of one thread, or of all
processes of the engine, so that other work on the machine hardly counts.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from launcher.layout.step_model import Rates, Shape, Workload, forward_flops, generation, read_shape, step

TOKENS = 4096  # of a batch
CALIBRATED, CHECKED = 512, (64, 4096)  # tokens a sample
ANSWER, REQUESTS = 128, (8, 256)
PREDICTED = ((64, 128), (64, 512))  # requests at a time, tokens an answer
CPU = Rates(gpu_bytes=1e15, memory_share=1.0)


def check() -> str:
    """The table, in Markdown."""
    torch.set_num_threads(1)
    rates = replace(CPU, peak=matrix_flops(), memory=copy_bandwidth())
    lines = [
        f"one thread: {rates.peak / 1e9:.0f} GFLOP/s in a large product, {rates.memory / 1e9:.1f} GB/s in a copy",
        "",
        "| CPU time | measured | model | model / measured |",
        "|---|---|---|---|",
    ]
    for row in (*learner_rows(rates), *generator_rows(rates)):
        name, measured, predicted = row
        lines.append(f"| {name} | {measured:,.2f} | {predicted:,.2f} | {predicted / measured:.2f} |")
    return "\n".join(lines)


def matrix_flops(size: int = 2048, rounds: int = 6) -> float:
    """FLOP a CPU second of a product of large matrices."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    a @ b
    began = time.process_time()
    for _ in range(rounds):
        a @ b
    return rounds * 2 * size**3 / (time.process_time() - began)


def copy_bandwidth(size: int = 1 << 28, rounds: int = 8) -> float:
    """Bytes that a copy reads and writes in a CPU second."""
    source = torch.ones(size, dtype=torch.uint8)
    target = torch.empty_like(source).copy_(source)
    began = time.process_time()
    for _ in range(rounds):
        target.copy_(source)
    return rounds * 2 * size / (time.process_time() - began)


def learner_rows(rates: Rates) -> list[tuple[str, float, float]]:
    """Seconds of a learner step by tokens a sample."""
    measured = {}
    with tempfile.TemporaryDirectory() as name:
        shape = _save_model(Path(name) / "model")
        for tokens in (CALIBRATED, *CHECKED):
            measured[tokens] = learner_seconds(Path(name), tokens)

    def run(tokens: int) -> Workload:
        return Workload(
            training=1,
            batch=TOKENS // tokens,
            prompt=tokens / 3,
            response=tokens * 2 / 3,
            mini_batches=1,
            recompute_activations=False,
            rescore=False,
        )

    # Of the model's seconds those of the passes scale with the share.
    forward = run(CALIBRATED).batch * forward_flops(shape, run(CALIBRATED))
    head = run(CALIBRATED).batch * run(CALIBRATED).response * 2 * shape.head_parameters
    rates = replace(rates, train_share=(3 * forward + head) / rates.peak / measured[CALIBRATED])
    return [
        (
            f"learner, s a step of {TOKENS:,} tokens, {tokens:,} a sample" + " (calibrated)" * (tokens == CALIBRATED),
            measured[tokens],
            step(shape, rates, run(tokens)).train,
        )
        for tokens in (CALIBRATED, *CHECKED)
    ]


def _save_model(folder: Path) -> Shape:
    """A random Qwen3 of 21 M parameters, in whose steps products of matrices take most of the time."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from launcher.quickstart.tiny_model import build_tokenizer, save

    tokenizer = build_tokenizer()
    config = Qwen3Config(
        vocab_size=4096, hidden_size=512, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, max_position_embeddings=8192, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, dtype="float32",
    )  # fmt: skip
    save(Qwen3ForCausalLM(config), tokenizer, folder)
    return read_shape(folder)


def learner_seconds(folder: Path, tokens: int, rounds: int = 3) -> float:
    """CPU seconds of `Trainer.train` on one batch of samples that are all equally long."""
    import numpy as np

    from benchmarks.learner import make_config
    from common.payload import Payload
    from learner.batch.plan import plan_micro_batches
    from learner.batch.tensors import Packer
    from learner.ranks.world import start
    from learner.trainer import Trainer

    samples, prompt = TOKENS // tokens, tokens // 3
    config, rng = make_config(folder, samples), np.random.default_rng(0)
    payload = Payload(
        rng.integers(0, 256, tokens).astype(np.int32),
        np.array([[prompt, tokens]], np.int32),
        -rng.random(tokens - prompt).astype(np.float32),
        np.array([[0, 0, tokens - prompt]], np.int32),
    )
    trainer = Trainer(config, start())
    places = plan_micro_batches([[tokens]] * samples, 1, 1, config.learner.token_budget).of_rank(0)
    advantages = rng.normal(size=samples).tolist()
    batch = Packer(256).rollout_batch(0, places, dict.fromkeys(range(samples), payload), advantages, [0.5] * samples)
    trainer.train(batch)
    began = time.process_time()
    for _ in range(rounds):
        trainer.train(batch)
    return (time.process_time() - began) / rounds


def generator_rows(rates: Rates) -> list[tuple[str, float, float]]:
    """Milliseconds of an engine by requests at a time and tokens an answer."""
    shape, measured = None, {}
    for requests, answer in (*((requests, ANSWER) for requests in REQUESTS), *PREDICTED):
        with tempfile.TemporaryDirectory() as name:
            shape, measured[requests, answer] = engine_seconds(Path(name), requests, answer)
    assert shape is not None

    def predicted(rates: Rates, requests: int, answer: int) -> float:
        run = Workload(generating=1, prompt=20, response=answer, concurrency=requests, rescore=False)
        return generation(shape, rates, run)[0]

    # Two overheads from two measurements: what is left of a token's time is s / requests + r.
    bare = replace(rates, step_overhead=0.0, request_overhead=0.0)
    few, many = REQUESTS
    left = [(measured[requests, ANSWER] - predicted(bare, requests, ANSWER)) / ANSWER for requests in REQUESTS]
    overhead = (left[0] - left[1]) / (1 / few - 1 / many)
    rates = replace(rates, step_overhead=overhead, request_overhead=left[1] - overhead / many)
    return [
        (
            f"engine, ms an answer of {answer} tokens, {requests} at a time" + " (calibrated)" * (requests in REQUESTS),
            1000 * seconds,
            1000 * predicted(rates, requests, answer),
        )
        for (requests, answer), seconds in measured.items()
    ]


def engine_seconds(folder: Path, requests: int, answer: int) -> tuple[Shape, float]:
    """The shape of the model, and CPU seconds of an answer of bare `AsyncLLM`, all its processes together."""
    from benchmarks.pipeline import prepare

    config = prepare(folder, requests, answer)
    command = [sys.executable, "-m", "benchmarks.pipeline", "--bare", str(config), "--seconds", "6"]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return read_shape(folder / "model"), float(output.split()[1]) * answer / 1e6
