"""Golden case B05: a sample's advantage reaches its model tokens and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from common.payload import Payload
from learner.batch import micro_batch

CASES = json.loads((Path(__file__).parents[2] / "golden" / "spo_golden.json").read_text())["cases"]


def payload(mask: np.ndarray) -> Payload:
    """One prompt token, then a response whose model tokens are those of `mask` [R]."""
    borders = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]]))) + 1
    sampled = int(mask.sum())
    spans = np.array([[0, 0, sampled]], np.int32)
    ids = np.arange(1 + len(mask), dtype=np.int32)
    return Payload(ids, borders.reshape(-1, 2).astype(np.int32), np.zeros(sampled, np.float32), spans)


def test_b05_advantages_are_broadcast_to_model_tokens_only() -> None:
    case = next(case for case in CASES if case["id"] == "B05")
    masks = np.array(case["inputs"]["model_token_mask"], int)
    samples = [payload(mask) for mask in masks]
    batch = micro_batch(list(zip(samples, case["inputs"]["A_norm"], strict=True)))
    assert batch.model_tokens == masks.sum()
    tokens = np.zeros(masks.shape)
    tokens[masks == 1] = batch.advantages.numpy()
    np.testing.assert_allclose(tokens, case["expected"]["token_advantages"], rtol=1e-6)
