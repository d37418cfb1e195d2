"""Common prefixes of the rows of a micro-batch are packed once, and go through the model once.

Samples share a system prompt and the descriptions of tools, those of a group their whole prompt, and the rows of an
episode all turns before they part. The rows are laid out as a prefix tree, in which each shared token has one place
among the packed tokens. Embeddings, projections and feed-forward layers, which see a token alone, compute it once;
attention reads it for every row that begins with it (`learner.policy.attention`). Log-probs and gradients are the same
as without sharing, but for rounding, because attention is causal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

LEAST_SAVING = 0.2  # of the tokens; below it, laying rows out for attention costs more than is saved


class PackedRows(NamedTuple):
    """Rows of tokens, packed.

    Attributes:
        tokens: int64 [T].
        positions: of each token inside its row, int64 [T].
        places: packed position of each token of the rows laid end to end, int64 [the sum of their lengths]; None if
            the rows are packed end to end.
    """

    tokens: np.ndarray
    positions: np.ndarray
    places: np.ndarray | None


def pack_rows(rows: Sequence[np.ndarray], share: bool) -> PackedRows:
    """Pack rows of token ids: as a tree if `share` and at least `LEAST_SAVING` is saved, otherwise end to end."""
    laid_out = np.concatenate(rows).astype(np.int64)
    positions = np.concatenate([np.arange(len(row)) for row in rows])
    if share and len(rows) > 1:
        places = tree_places(rows)
        _, first = np.unique(places, return_index=True)  # for each packed token, its first position in the rows
        if len(first) <= (1 - LEAST_SAVING) * len(laid_out):
            return PackedRows(laid_out[first], positions[first], places)
    return PackedRows(laid_out, positions, None)


def tree_places(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Packed position of each token of the rows laid end to end, int64; common prefixes share their positions."""
    # In alphabetical order a row's longest common prefix with any earlier row is the one with the row before it.
    alphabetical = sorted(range(len(rows)), key=lambda i: rows[i].astype(">u4").tobytes())
    places: list[np.ndarray] = [np.empty(0, np.int64)] * len(rows)
    before, end = np.empty(0, rows[0].dtype), 0
    places_before = places[0]
    for i in alphabetical:
        row = rows[i]
        shared = min(len(row), len(before))
        differs = np.flatnonzero(row[:shared] != before[:shared])
        shared = int(differs[0]) if len(differs) else shared
        own = len(row) - shared
        places[i] = np.concatenate([places_before[:shared], np.arange(end, end + own)])
        before, places_before, end = row, places[i], end + own
    return np.concatenate(places)
