"""Records the learner's inputs and results for the tokens of kept episodes, for inspection and audit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import isnan, nan
from pathlib import Path
from typing import Any

import torch

from common.errors import UserError
from common.files import remove_oldest, rewrite
from common.messages import Batch
from common.payload import expert_sums
from learner.batch.tensors import MicroBatch
from learner.step_loss import PolicyOutput

FOLDER = "training_data"
DIGITS = 5


class TokenRecord:
    """The tokens of a batch's kept samples, collected while it is trained on and written afterwards.

    Nothing here waits for the device before `write`.
    """

    def __init__(self, batch: Batch) -> None:
        columns = batch.turn_advantages or [[advantage] for advantage in batch.advantages]
        kept = batch.kept or [False] * len(columns)
        self._advantages = {
            sample: advantages
            for sample, advantages, is_kept in zip(batch.sample_ids, columns, kept, strict=True)
            if is_kept
        }
        self._passes: list[tuple[int, MicroBatch, torch.Tensor, torch.Tensor]] = []

    def __bool__(self) -> bool:
        return bool(self._advantages)

    def add(self, mini_batch: int, micro: MicroBatch, policy: PolicyOutput) -> None:
        """Record a micro-batch after its forward pass by the weights from before optimizer step `mini_batch`."""
        if any(sample in self._advantages for sample, _ in micro.names):
            self._passes.append((mini_batch, micro, policy.logprobs.detach(), policy.entropies.detach()))

    def write(self, folder: Path, version: int, rank: int, keep_bytes: int | None = None) -> None:
        """Write one line per row to `training_data/<version>.<rank>.jsonl`; a batch trained on again replaces it.

        Files of older versions are removed while the folder is larger than `keep_bytes`. Raises `UserError`.
        """
        path = folder / FOLDER / f"{version}.{rank}.jsonl"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Synced before a checkpoint counts, because the batches before a checkpoint are not trained on again.
            rewrite(path, (f"{line}\n".encode() for line in self._lines()))
            if keep_bytes is not None:
                remove_oldest(path.parent, keep_bytes)
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror}") from None

    def _lines(self) -> Iterator[str]:
        for mini_batch, micro, logprobs, entropies in self._passes:
            lengths = micro.layout.lengths.tolist()
            columns = _columns(micro) | {"logprobs": logprobs, "entropies": entropies}
            of_rows = {name: values.cpu().split(lengths) for name, values in columns.items()}
            for number, (sample, row) in enumerate(micro.names):
                if sample in self._advantages:
                    line: dict[str, Any] = {"task_id": sample, "row": row, "mini_batch": mini_batch}
                    line["advantages"] = _rounded(self._advantages[sample])
                    line |= {name: _listed(values[number]) for name, values in of_rows.items()}
                    yield json.dumps(line)


def _columns(micro: MicroBatch) -> dict[str, torch.Tensor]:
    """The learner's inputs for each model token of a micro-batch, and a critic's results, [N] or [N, K]."""
    tokens = slice(micro.model_tokens)
    columns = {
        "token_ids": micro.targets[tokens],
        "token_versions": micro.versions,
        "rollout_logprobs": micro.rollout_logprobs,
    }
    if micro.experts is not None and micro.known is not None:
        # A token's experts are those of the state that predicts it.
        places = micro.predict[tokens].cpu().numpy()
        columns["experts"] = torch.tensor(expert_sums(micro.experts.cpu().numpy(), micro.known.cpu().numpy(), places))
    if micro.teacher is not None:
        is_scored, scores = micro.teacher.scored, micro.teacher.logprobs
        columns["teacher_logprobs"] = torch.where(is_scored if scores.ndim == 1 else is_scored[:, None], scores, nan)
    if micro.values is not None and micro.returns is not None:
        # With a critic each token has an advantage of its own; the sampler's is then the tracker's.
        columns |= {"values": micro.values, "returns": micro.returns, "token_advantages": micro.advantages}
    return columns


def discard(folder: Path, first: int) -> None:
    """Remove records of batch `first` and later ones, of another run or to be written again; raises `UserError`."""
    for path in (folder / FOLDER).glob("*.jsonl"):
        version = path.name.partition(".")[0]
        if version.isdecimal() and int(version) >= first:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise UserError(
                    f"{path} cannot be removed: {error.strerror}; it is of an earlier run or attempt"
                ) from None


def _listed(values: torch.Tensor) -> list[Any]:
    """Integers unchanged, floats rounded, NaN as null."""
    if not values.dtype.is_floating_point:
        return values.tolist()
    return [_rounded(one) if isinstance(one, list) else _rounded([one])[0] for one in values.float().tolist()]


def _rounded(values: list[float]) -> list[float | None]:
    return [None if isnan(value) else round(value, DIGITS) for value in values]
