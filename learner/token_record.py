"""Records the log-probs and entropies of kept episodes in the step that trained on them, for inspection."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch

from common.errors import UserError
from common.files import Keep, remove_oldest, rewrite
from common.messages import Batch
from learner.batch import MicroBatch
from learner.step_loss import PolicyOutput

FOLDER = "training_data"
DIGITS = 5


class TokenRecord:
    """Log-probs and entropies of a batch's kept samples, collected while it is trained on and written afterwards.

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
        """Record a micro-batch that has gone through the model in the optimizer step of this number.

        Args:
            policy: of the weights before that step, [N] each.
        """
        if any(sample in self._advantages for sample, _ in micro.names):
            self._passes.append((mini_batch, micro, policy.logprobs.detach(), policy.entropies.detach()))

    def write(self, folder: Path, version: int, rank: int, keep: Keep | None = None) -> None:
        """Write one line per row to `training_data/<version>.<rank>.jsonl`; a batch trained on again replaces it.

        Args:
            keep: files of older versions are removed; None: all stay.

        Raises:
            UserError: the file cannot be written.
        """
        path = folder / FOLDER / f"{version}.{rank}.jsonl"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # On the disk before a checkpoint counts: its batches are not trained on again.
            rewrite(path, (f"{line}\n".encode() for line in self._lines()))
            if keep is not None:
                remove_oldest(path.parent, keep)
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror}") from None

    def _lines(self) -> Iterator[str]:
        for mini_batch, micro, *values in self._passes:
            lengths = micro.layout.lengths.tolist()
            logprobs, entropies = (value.float().cpu().split(lengths) for value in values)
            # With a critic each token has an advantage of its own; the sampler's is then the tracker's.
            by_token = [None] * len(lengths) if micro.rewards is None else micro.advantages.cpu().split(lengths)
            columns = (micro.names, logprobs, entropies, by_token)
            for (sample, row), logprob, entropy, of_tokens in zip(*columns, strict=True):
                if sample in self._advantages:
                    line = {
                        "task_id": sample,
                        "row": row,
                        "mini_batch": mini_batch,
                        "advantages": _rounded(self._advantages[sample]),
                        "logprobs": _rounded(logprob.tolist()),
                        "entropies": _rounded(entropy.tolist()),
                    }
                    if of_tokens is not None:
                        line["token_advantages"] = _rounded(of_tokens.tolist())
                    yield json.dumps(line)


def discard(folder: Path, first: int) -> None:
    """Remove records of batch `first` and later ones: another run left them, or the batches are trained on again.

    Raises:
        UserError: a file cannot be removed.
    """
    for path in (folder / FOLDER).glob("*.jsonl"):
        version = path.name.partition(".")[0]
        if version.isdecimal() and int(version) >= first:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise UserError(f"{path} of another run cannot be removed: {error.strerror}") from None


def _rounded(values: list[float]) -> list[float]:
    return [round(value, DIGITS) for value in values]
