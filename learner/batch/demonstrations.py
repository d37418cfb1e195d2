"""Demonstrations as tokens with weights, in files that all ranks map into memory. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

import numpy as np

from common.config import Config
from common.errors import UserError
from common.messages import Batch
from common.payload import Payload

NAMES = ("token_ids", "weights", "ends")


def folder_of(config: Config, part: Literal["train", "heldout", "mixed"]) -> Path:
    """Where the run folder has demonstrations: `sft.data`, `sft.heldout`, or `algorithm.demonstrations.data`."""
    return config.run.folder / "demonstrations" / part


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A conversation as tokens.

    Attributes:
        token_ids: int32 [T].
        weights: of each token in the loss, float32 [T]; 0 for tokens that the model does not learn to write.
    """

    token_ids: np.ndarray
    weights: np.ndarray

    @classmethod
    def of_spans(cls, token_ids: np.ndarray, spans: Iterable[tuple[int, int, float]]) -> Self:
        """Tokens with weights in some ranges, each (start, end, weight), and 0 elsewhere."""
        weights = np.zeros(len(token_ids), np.float32)
        for start, end, weight in spans:
            weights[start:end] = weight
        return cls(token_ids, weights)

    @property
    def is_trained(self) -> bool:
        return bool(self.weights.any())

    def cut(self, length: int) -> Demonstration:
        return Demonstration(self.token_ids[:length], self.weights[:length])

    def payload(self, version: int) -> tuple[Payload, list[float]]:
        """The demonstration as a sample of weight version `version`, and the weight of each model span.

        A model span holds consecutive tokens of the same weight, which is not 0.
        """
        edges = np.flatnonzero(np.diff(self.weights)) + 1
        bounds = np.array([0, *edges, len(self.weights)])
        trained = self.weights[bounds[:-1]] != 0
        spans = np.stack([bounds[:-1], bounds[1:]], axis=1)[trained].astype(np.int32)
        tokens = int((spans[:, 1] - spans[:, 0]).sum())
        versions = np.array([[version, 0, tokens]], np.int32)
        payload = Payload(np.asarray(self.token_ids), spans, np.zeros(tokens, np.float32), versions)
        return payload, self.weights[spans[:, 0]].tolist()


class Demonstrations:
    """Demonstrations, by their number.

    Args:
        token_ids, weights: of all of them, one after the other, int32 and float32 [N].
        ends: where each ends, int64 [R].
    """

    def __init__(self, token_ids: np.ndarray, weights: np.ndarray, ends: np.ndarray) -> None:
        self._token_ids, self._weights, self._ends = token_ids, weights, ends

    @classmethod
    def of(cls, rows: Sequence[Demonstration]) -> Self:
        ends = np.cumsum([len(row.token_ids) for row in rows], dtype=np.int64)
        return cls(np.concatenate([row.token_ids for row in rows]), np.concatenate([row.weights for row in rows]), ends)

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Those that `save` has written; raises `UserError` if the files cannot be read."""
        try:
            token_ids, weights, ends = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in NAMES)
            if not len(token_ids) == len(weights) == ends[-1]:
                raise ValueError("its files do not belong together")
            return cls(token_ids, weights, ends)
        except (OSError, ValueError, EOFError, IndexError) as error:
            raise UserError(
                f"demonstrations {folder} cannot be read ({error}): `spo run` and `spo sft` write them at their start; "
                "for a learner that is started by itself, `python -m launcher.demonstrations.render CONFIG` does"
            ) from None

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, array in zip(NAMES, (self._token_ids, self._weights, self._ends), strict=True):
            np.save(folder / f"{name}.npy", array)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, number: int) -> Demonstration:
        start = int(self._ends[number - 1]) if number else 0
        end = int(self._ends[number])
        return Demonstration(self._token_ids[start:end], self._weights[start:end])

    @property
    def tokens(self) -> int:
        return len(self._token_ids)

    @property
    def trained_tokens(self) -> int:
        return int(np.count_nonzero(self._weights))

    def batch(self, numbers: Sequence[int], version: int, scaled: bool = True) -> tuple[Batch, dict[str, Payload]]:
        """Demonstrations as a batch, and their payloads by sample id.

        Advantages are the weights; if `scaled`, with a mean of 1 over the batch's trained tokens, so that the mean of
        the tokens' losses is their weighted mean.
        """
        rows = [self[number] for number in numbers]
        samples = [row.payload(version) for row in rows]
        ids = [f"{place}-{number}" for place, number in enumerate(numbers)]  # a batch may be longer than the data
        mean = 1.0
        if scaled:
            mean = sum(float(row.weights.sum(dtype=np.float64)) for row in rows)
            mean /= sum(len(payload.logprobs) for payload, _ in samples)
        batch = Batch(
            batch_id=version,
            sample_ids=ids,
            advantages=[0.0] * len(ids),
            rewards=[0.0] * len(ids),
            tokens=[len(payload.token_ids) for payload, _ in samples],
            turn_advantages=[[weight / mean for weight in weights] for _, weights in samples],
        )
        return batch, {sample_id: payload for sample_id, (payload, _) in zip(ids, samples, strict=True)}


def numbers_at(start: int, stop: int, count: int, seed: int | None) -> list[int]:
    """The demonstrations at positions `start` to `stop` of an endless sequence of epochs.

    Args:
        count: number of demonstrations; an epoch has each of them once.
        seed: of each epoch's order; None means the order of the data.
    """
    positions = range(start, stop)
    if seed is None:
        return [position % count for position in positions]
    epochs = range(start // count, -(-stop // count))
    orders = {epoch: np.random.default_rng([seed, epoch]).permutation(count) for epoch in epochs}
    return [int(orders[position // count][position % count]) for position in positions]
