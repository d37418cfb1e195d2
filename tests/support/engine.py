"""A tiny model on disk, its twin in transformers, and an engine on it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from common.config import Config, parse_config
from common.log import get_logger
from generator.engine.engine import Engine
from generator.weights.shared_weights import MemoryFile, SharedWeights
from launcher.quickstart.tiny_model import build_model, build_tokenizer, save
from learner.policy.disk_names import DiskNames
from learner.publish.weight_copy import copy_weights

MAX_MODEL_LEN = 512


def tiny_model(seed: int) -> PreTrainedModel:
    return build_model(build_tokenizer(), seed).eval()


def save_tiny_model(folder: Path, seed: int) -> PreTrainedModel:
    model = tiny_model(seed)
    save(model, build_tokenizer(), folder)
    return model


def engine_config(folder: Path, max_concurrency: int = 16, **engine: Any) -> Config:
    """Float32, so that log-probs can be compared to the digit."""
    return parse_config(
        {
            "model": {"path": str(folder), "dtype": "float32", "max_model_len": MAX_MODEL_LEN},
            "data": {"train": "none.jsonl", "max_prompt_tokens": MAX_MODEL_LEN // 2},
            "generator": {"max_concurrency": max_concurrency, "engine": engine},
        }
    )


async def start_engine(folder: Path, max_concurrency: int = 16, **engine: Any) -> Engine:
    """An engine that shares this process's cores with the tests."""
    torch.set_num_threads(1)
    return await Engine.start(engine_config(folder, max_concurrency, **engine), get_logger())


def shared(
    version: int, weights: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype = torch.float32
) -> SharedWeights:
    """Weights as they lie in shared memory after a transfer."""
    snapshot = copy_weights(version, weights, dtype, 1 << 24).snapshot()
    return SharedWeights(snapshot.manifest, snapshot.file, 0.0, MemoryFile.close)


async def load(engine: Engine, version: int, model: PreTrainedModel) -> float:
    """Put a model's weights into the engine; returns the seconds of the pause."""
    weights = shared(version, DiskNames(model).of(model.named_parameters()))
    try:
        return await engine.load(version, weights)
    finally:
        weights.close()


@torch.no_grad()
def reference_logprobs(model: PreTrainedModel, token_ids: Any, temperature: float = 1.0) -> np.ndarray:
    """Log-prob of each token given those before it by transformers, float32 [T]; the first is 0."""
    ids = torch.as_tensor(np.asarray(token_ids), dtype=torch.long)
    logits = model(ids[None]).logits[0, :-1].float() / temperature
    scores = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
    return np.concatenate([[0.0], scores.numpy()]).astype(np.float32)


def random_prompt(seed: int, length: int) -> list[int]:
    """Token ids of plain bytes."""
    return np.random.default_rng(seed).integers(0, 256, length).tolist()
