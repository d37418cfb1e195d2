"""Log-probs of rows of tokens, packed by the learner and one by one by transformers."""

from __future__ import annotations

import numpy as np
import torch

from learner.batch.prefixes import pack_rows
from learner.policy.attention import pack_sequences
from learner.policy.forward_check import as_transformers
from learner.policy.model import Policy


def some_rows(policy: Policy, lengths: list[int]) -> list[np.ndarray]:
    tokens = np.random.default_rng(1).integers(0, policy.vocabulary, sum(lengths))
    return np.split(tokens, np.cumsum(lengths)[:-1])


def packed(policy: Policy, rows: list[np.ndarray], share: bool = False) -> torch.Tensor:
    """Log-probs of every token but the first of each row, packed."""
    tokens = pack_rows([row.astype(np.uint32) for row in rows], share)
    lengths = [len(row) for row in rows]
    assert (tokens.places is not None) == share
    sequences = pack_sequences(lengths, places=tokens.places)
    places = np.arange(sum(lengths)) if tokens.places is None else tokens.places
    ends = np.cumsum(lengths)
    predict = torch.from_numpy(
        np.concatenate([places[end - n : end - 1] for end, n in zip(ends, lengths, strict=True)])
    )
    targets = torch.from_numpy(np.concatenate([row[1:] for row in rows]))
    ids, positions = torch.from_numpy(tokens.tokens)[None], torch.from_numpy(tokens.positions)[None]
    order = torch.argsort(predict, stable=True)
    logprobs, _ = policy(ids, positions, sequences, predict[order], targets[order])
    return logprobs[torch.argsort(order)]


def alone(policy: Policy, rows: list[np.ndarray]) -> torch.Tensor:
    """The same by transformers' own forward pass, one row at a time."""
    parts = []
    policy.packing.sequences = None
    with as_transformers(policy.model):
        for row in map(torch.from_numpy, rows):
            logits = policy.model(input_ids=row[None], use_cache=False).logits[0, :-1]
            parts.append(logits.log_softmax(-1).gather(1, row[1:, None])[:, 0])
    return torch.cat(parts)
