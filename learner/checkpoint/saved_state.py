"""Reads each parameter from the ranks' files of a checkpoint, whatever number of ranks and ZeRO stage wrote them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from learner.checkpoint.plain_data import read

WHOLE = "mp_rank_00_model_states.pt"  # whole weights; under ZeRO 3 the file has another name
OPTIMIZER_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
FP32 = "fp32"  # key of the weights, beside the keys of the optimizer's tensors (Adam's `exp_avg` and `exp_avg_sq`)


class Indivisible(Exception):
    """A checkpoint fits only as many ranks as wrote it, with their ZeRO stage; the text says why."""


@dataclass(frozen=True, slots=True)
class SavedParameter:
    """A trained parameter: the flat pieces [any] of its fp32 weights and of each of the optimizer's tensors, in order.

    Pieces are mapped from the files, so that only the used ones are read.
    """

    shape: torch.Size
    pieces: dict[str, list[torch.Tensor]] = field(default_factory=dict)

    def part(self, key: str, start: int, length: int) -> torch.Tensor:
        """A copy of elements `start` to `start + length` of a flat tensor, [length]."""
        parts, end = [], start + length
        for piece in self.pieces[key]:
            parts.append(piece[max(start, 0) : max(end, 0)])
            start, end = start - len(piece), end - len(piece)
        return torch.cat(parts)

    def whole(self, key: str) -> torch.Tensor:
        """A copy of a tensor in the parameter's shape."""
        return self.part(key, 0, math.prod(self.shape)).view(self.shape)


@dataclass(frozen=True, slots=True)
class SavedState:
    """The state that training continues from.

    Attributes:
        parameters: by their names in the policy.
        counts: the optimizer's values that are not tensors, equal for all parameters: Adam's `step`.
        settings: the optimizer's learning rate, weight decay and so on.
        counters: DeepSpeed's.
    """

    parameters: dict[str, SavedParameter]
    counts: dict[str, Any]
    settings: dict[str, Any]
    counters: dict[str, int]


@dataclass(frozen=True, slots=True)
class Flat:
    """A flat tensor that the optimizer changes, its state, and its pieces: name, offset and length of each."""

    weights: torch.Tensor
    state: dict[str, Any]
    places: Iterable[tuple[str, int, int]]


def read_state(folder: Path, names: Iterable[str] = ()) -> SavedState:
    """Read the state that the ranks wrote into a folder.

    Args:
        names: of the parameters in the optimizer's order; needed if it was written without ZeRO.

    Raises:
        Indivisible: the optimizer has state that belongs to no single parameter.
        Exception: a file is missing or cannot be read.
    """
    in_pieces = sorted(folder.glob("*zero_pp_rank_0_mp_rank_00_model_states.pt"))
    model = read(in_pieces[0] if in_pieces else folder / WHOLE, mmap=True)
    if model["optimizer"] is not None:
        shapes = {name: model["module"][name].shape for name in names}
        optimizer, flats = model["optimizer"], list(_whole_flats(model, shapes))
    else:
        shapes = {name: torch.Size(shape) for group in model["param_shapes"] for name, shape in group.items()}
        optimizer, flats = _flats_of_ranks(folder, model)
    parameters = {name: SavedParameter(shape) for name, shape in shapes.items()}
    counts: dict[str, Any] = {}
    for flat in flats:
        tensors, others = _split(flat)
        if counts and others and counts != others:
            raise Indivisible("its optimizer's counters differ between parts of the model")
        counts = counts or others
        for name, offset, length in flat.places:
            for key, tensor in tensors.items():
                parameters[name].pieces.setdefault(key, []).append(tensor[offset : offset + length])
    for name, parameter in parameters.items():
        for key, pieces in parameter.pieces.items():
            if sum(map(len, pieces)) != math.prod(parameter.shape):
                raise Indivisible(f"its files do not hold all of {key} of {name}")
    settings = {key: value for key, value in optimizer["param_groups"][0].items() if key != "params"}
    counters = {key: model[key] for key in ("global_steps", "global_samples", "skipped_steps")}
    return SavedState(parameters, counts, settings, counters)


def _whole_flats(model: dict[str, Any], shapes: dict[str, torch.Size]) -> Iterator[Flat]:
    """Without ZeRO every rank has everything, and the first one wrote it."""
    for number, (name, shape) in enumerate(shapes.items()):
        state = model["optimizer"]["state"].get(number, {})
        for key, value in state.items():
            if torch.is_tensor(value) and value.dim() and value.shape != shape:
                raise Indivisible(f"its optimizer has {key!r} of another shape than the weights")
        flat = {
            key: value.flatten() if torch.is_tensor(value) and value.dim() else value for key, value in state.items()
        }
        yield Flat(model["module"][name].flatten(), flat, [(name, 0, math.prod(shape))])


def _flats_of_ranks(folder: Path, model: dict[str, Any]) -> tuple[dict[str, Any], list[Flat]]:
    """The first rank's optimizer, and the flat tensors of all ranks, the first rank's first."""
    files = {int(name[1]): path for path in folder.iterdir() if (name := OPTIMIZER_FILE.fullmatch(path.name))}
    ranks, flats, first = model["dp_world_size"], [], None
    for rank in range(ranks):
        if rank not in files:
            raise FileNotFoundError(f"the optimizer's file of rank {rank} of {ranks} is missing")
        content = read(files[rank], mmap=True)["optimizer_state_dict"]
        if "fp32_flat_groups" in content:
            optimizer, weights = content["optimizer_state_dict"], content["fp32_flat_groups"]
            places = [list(_places_of_stage_3(shapes, rank, ranks)) for shapes in model["param_shapes"]]
        else:
            optimizer, weights = content["base_optimizer_state"], content["single_partition_of_fp32_groups"]
            places = [
                [(name, place["start"], place["numel"]) for name, place in group.items()]
                for group in content["param_slice_mappings"]
            ]
        if not isinstance(optimizer, dict):
            raise Indivisible("it was written with zero_optimization.elastic_checkpoint")
        first = first or optimizer
        states = (optimizer["state"].get(number, {}) for number in range(len(weights)))
        flats += [Flat(*parts) for parts in zip(weights, states, places, strict=True)]
    assert first is not None
    return first, flats


def _places_of_stage_3(shapes: dict[str, Any], rank: int, ranks: int) -> Iterator[tuple[str, int, int]]:
    """Each parameter is divided evenly, and its last piece is padded."""
    offset = 0
    for name, shape in shapes.items():
        whole = math.prod(shape)
        size = -(-whole // ranks)
        yield name, offset, max(0, min(size, whole - rank * size))
        offset += size


def _split(flat: Flat) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors with a value for each weight, the weights among them, and the other values."""
    tensors, others = {FP32: flat.weights}, {}
    for key, value in flat.state.items():
        if not torch.is_tensor(value) or value.dim() == 0:
            others[key] = value
        elif value.numel() >= flat.weights.numel():  # ZeRO 1 and 2 pad them
            tensors[key] = value
        else:
            raise Indivisible(
                f"its optimizer has {key!r} of {value.numel():,} elements for {len(flat.weights):,} weights"
            )
    return tensors, others
