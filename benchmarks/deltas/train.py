"""Bytes a version of a real model that is trained with real gradients, and how long it takes behind a network card."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import structlog
import torch
import xxhash
from transformers import AutoModelForCausalLM

from benchmarks import slow_link
from common.config import WeightsConfig
from generator.weights.weight_client import WeightClient
from learner.publish.weight_server import WeightServer

CONFIG = WeightsConfig(shared_folder="off", deltas="on")
SPAWN = multiprocessing.get_context("spawn")
Episode = dict[str, Any]


def measure(model: Path, rollouts: Path, rates: Sequence[float], steps: int, batch: int, gbit: float) -> None:
    """Print a row for each learning rate: the medians of all versions but the first, which comes whole."""
    episodes = [
        row
        for row in map(json.loads, rollouts.read_text(encoding="utf-8").splitlines())
        if row.get("token_ids") and row.get("reward") is not None
    ]
    print(f"card of {gbit:g} Gbit/s; {len(episodes)} episodes\n")
    print(
        "| learning rate | weights changed | bytes a version | times fewer | s to publish | s until loaded "
        "| whole: bytes | s to publish | s until loaded |\n|---|---|---|---|---|---|---|---|---|"
    )
    for rate in rates:
        _row(model, episodes, rate, steps, batch, gbit)


def _row(folder: Path, episodes: list[Episode], rate: float, steps: int, batch: int, gbit: float) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    server = WeightServer(CONFIG)
    link, link_end = SPAWN.Pipe()
    card = SPAWN.Process(target=slow_link.run, args=(link_end, server.address, gbit * 1e9 / 8), daemon=True)
    card.start()
    pipe, pipe_end = SPAWN.Pipe()
    endpoint = server.endpoint() | {"address": link.recv()}
    receiver = SPAWN.Process(target=_receive, args=(pipe_end, endpoint), daemon=True)
    receiver.start()
    pipe.recv()
    rows = []
    before: np.ndarray | None = None
    for version, _ in enumerate(_trained(model, episodes, rate, steps, batch)):
        sent, began = server.sent.bytes, time.monotonic()
        server.serve(server.copy(version, _tensors(model), torch.bfloat16))
        published = time.monotonic()
        arrived, digest = pipe.recv()
        weights = _bytes(model)
        assert digest == xxhash.xxh3_128_hexdigest(weights.data), "other weights have arrived"
        changed = float((weights.view(np.uint16) != before.view(np.uint16)).mean()) if before is not None else 1.0
        rows.append((changed, server.sent.bytes - sent, published - began, arrived - began))
        before = weights
    whole, deltas = rows[0], [median(column) for column in zip(*rows[1:], strict=True)]
    print(
        f"| {rate:g} | {deltas[0]:.2%} | {deltas[1]:,.0f} | {whole[1] / deltas[1]:.1f} | {deltas[2]:.2f} "
        f"| {deltas[3]:.2f} | {whole[1]:,.0f} | {whole[2]:.2f} | {whole[3]:.2f} |",
        flush=True,
    )
    receiver.terminate()
    card.terminate()
    server.close()


def _trained(model: Any, episodes: list[Episode], rate: float, steps: int, batch: int) -> Iterator[None]:
    """Policy-gradient steps with Adam, in place; before the first, and after each, something is yielded.

    The advantage is the reward less the prompt's value at that time, z-scored over the batch, as in a run.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    yield
    for step in range(steps):
        chosen = [episodes[(step * batch + i) % len(episodes)] for i in range(batch)]
        raw = torch.tensor([episode["reward"] - episode["value"] for episode in chosen])
        advantages = (raw - raw.mean()) / (raw.std() + 1e-6)
        optimizer.zero_grad()
        count = sum(end - start for episode in chosen for start, end in episode["model_spans"])
        for episode, advantage in zip(chosen, advantages, strict=True):
            ids = torch.tensor([episode["token_ids"]])
            logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
            sampled = torch.cat([logprobs[start - 1 : end - 1] for start, end in episode["model_spans"]])
            (-advantage * sampled.sum() / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield


def _tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Each parameter once."""
    return iter(model.named_parameters())


def _bytes(model: Any) -> np.ndarray:
    """All weights as they are sent, one after the other."""
    parts = [tensor.detach().bfloat16().reshape(-1).view(torch.uint8).numpy() for _, tensor in _tensors(model)]
    return np.concatenate(parts)


def _receive(pipe: Connection, endpoint: dict[str, str]) -> None:
    """Send the time at which each version was there, and the digest of its weights."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    asyncio.run(_receive_all(pipe, endpoint))


async def _receive_all(pipe: Connection, endpoint: dict[str, str]) -> None:
    client = WeightClient(lambda: endpoint, CONFIG, timeout=120.0)
    pipe.send("ready")
    while True:
        with await client.next() as weights:
            arrived = time.monotonic()
            data, manifest = np.fromfile(weights.path, np.uint8), weights.manifest
            parts = [
                data[offset : offset + 2 * int(np.prod(shape, dtype=np.int64))]
                for offset, shape in zip(manifest.offsets, manifest.shapes, strict=True)
            ]
            pipe.send((arrived, xxhash.xxh3_128_hexdigest(np.concatenate(parts).data)))
