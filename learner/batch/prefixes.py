"""What the rows of a micro-batch begin with alike is packed once, and goes through the model once.

Samples share a system prompt and the descriptions of tools, those of a group their whole prompt, and the rows of an
episode what was said before they part. Laid out as a tree, whose branches the rows are, each such token has one place
among the packed tokens. Embeddings, projections and feed-forward layers, which see a token alone, compute it once;
attention reads it for every row that begins with it (`learner.policy.attention`). No token before the place
where rows part can tell them apart, so log-probs and gradients are the same as without, but for rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

LEAST_SAVING = 0.2  # of the tokens; below it, what attention moves for every row outweighs what is saved


class PackedRows(NamedTuple):
    """Rows of tokens, packed.

    Attributes:
        tokens: int64 [T].
        positions: of each token inside its row, int64 [T].
        places: packed position of each token of the rows laid end to end, int64 [the sum of their lengths]; None where
            that is how they are packed.
    """

    tokens: np.ndarray
    positions: np.ndarray
    places: np.ndarray | None


def pack_rows(rows: Sequence[np.ndarray], share: bool) -> PackedRows:
    """Pack rows of token ids: as a tree if asked to and at least `LEAST_SAVING` is saved, or else end to end."""
    laid_out = np.concatenate(rows).astype(np.int64)
    positions = np.concatenate([np.arange(len(row)) for row in rows])
    if share and len(rows) > 1:
        places = tree_places(rows)
        _, first = np.unique(places, return_index=True)  # a row in which each packed token stands
        if len(first) <= (1 - LEAST_SAVING) * len(laid_out):
            return PackedRows(laid_out[first], positions[first], places)
    return PackedRows(laid_out, positions, None)


def tree_places(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Packed position of each token of the rows laid end to end, int64: beginnings that are equal have the same."""
    # In alphabetical order a row shares with the one before it all that it shares with any before.
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
