"""Ulysses (arXiv 2309.14509): the ranks of a group hold slices of the same packed tokens, and divide the heads.

All layers but attention treat each token by itself, so a rank computes them for its slice [1, T / N]. For attention the
ranks exchange slices: each gets all T tokens of H / N heads, and afterwards its own tokens of all H heads again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F


@dataclass(frozen=True, slots=True)
class SequenceGroup:
    """The N ranks that hold slices of the same packed tokens.

    Attributes:
        rank: number of this rank among them, and of its slice.
        size: their number N.
        group: the process group of their exchanges; None only if nothing is sent.
    """

    rank: int
    size: int
    group: dist.ProcessGroup | None

    def exchange(self, parts: torch.Tensor) -> torch.Tensor:
        """Send `parts[r]` to rank r; returns the parts that were sent here, by rank [N, ...]. Differentiable."""
        from deepspeed.sequence.layer import _dim_zero_all_to_all, register_all_to_all_group

        register_all_to_all_group(self.group)
        received: torch.Tensor = _dim_zero_all_to_all(self.group, parts)
        return received

    def join(self, own: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """The ranks' lists [..., counts[r]], one after another.

        Backward passes on only the gradient of a rank's own values. Each rank computes the whole loss,
        so the sum of the ranks' gradients is the gradient of one loss.
        """
        before, after = sum(counts[: self.rank]), sum(counts[self.rank + 1 :])
        whole = F.pad(own.detach(), (before, after))
        dist.all_reduce(whole, group=self.group)
        return torch.cat([whole[..., :before], own, whole[..., before + own.shape[-1] :]], dim=-1)

    def total(self, own: torch.Tensor) -> torch.Tensor:
        """The sum of the ranks' values; as with `join`, backward passes on only the gradient of the rank's own."""
        whole = own.detach().clone()
        dist.all_reduce(whole, group=self.group)
        return whole + (own - own.detach())

    def among_slices(self, positions: torch.Tensor, length: int) -> tuple[list[int], slice]:
        """The number of these ascending positions in each rank's slice of `length` tokens, and those in this rank's."""
        counts = (positions // length).bincount(minlength=self.size).tolist()
        first = sum(counts[: self.rank])
        return counts, slice(first, first + counts[self.rank])

    def all_tokens(self, query: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values of this rank's slice to those of all tokens.

        Args:
            query, others: [1, H, T / N, D], each with its own H and D.

        Returns:
            [1, H / N, T, D] each; if N > H, of the one head that belongs to this rank's queries.
        """
        parts = [self._heads_by_rank(tensor[0]) for tensor in (query, *others)]
        received = self.exchange(torch.cat([part.flatten(2) for part in parts], dim=2)).flatten(0, 1)
        shapes = [part.shape[2:] for part in parts]
        pieces = zip(received.split([shape.numel() for shape in shapes], dim=1), shapes, strict=True)
        return tuple(piece.unflatten(1, shape).transpose(0, 1)[None] for piece, shape in pieces)

    def own_tokens(self, output: torch.Tensor) -> torch.Tensor:
        """Attention's output for all tokens [1, T, H / N, D] to that of this rank's slice [1, T / N, H, D]."""
        received = self.exchange(output[0].unflatten(0, (self.size, -1)))
        return received.transpose(0, 1).flatten(1, 2)[None]

    def _heads_by_rank(self, tensor: torch.Tensor) -> torch.Tensor:
        """[H, T / N, D] to [N, T / N, H / N, D]."""
        if tensor.shape[0] < self.size:
            tensor = tensor.repeat_interleave(self.size // tensor.shape[0], dim=0)
        return tensor.unflatten(0, (self.size, -1)).transpose(1, 2)
