"""Loads a checkpoint into the engine, even if another number of ranks or another ZeRO stage wrote it."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from common.errors import UserError, first_line
from common.log import get_logger
from learner.checkpoint.plain_data import reads_plain_data
from learner.checkpoint.saved_state import FP32, Indivisible, SavedState, read_state
from learner.ranks.world import World
from learner.trainer import Trainer


def load_own(trainer: Trainer, folder: Path) -> None:
    """Each rank reads what it wrote; raises `UserError` if it cannot be read."""
    for tag, engine in trainer.engines().items():
        try:
            with reads_plain_data(engine):
                loaded, _ = engine.load_checkpoint(str(folder), tag=tag, load_module_strict=not has_frozen(engine))
        except Exception as error:
            raise _unreadable(folder, error) from error
        if loaded is None:
            raise UserError(f"checkpoint {folder} is incomplete; remove it to use an earlier one")


def has_frozen(engine: Any) -> bool:
    """Whether some weights are frozen: no checkpoint holds those, only the model that training began with."""
    return not all(parameter.requires_grad for parameter in engine.module.parameters())


def load_redivided(trainer: Trainer, folder: Path, differing: str) -> None:
    """Each rank reads its part of what other ranks wrote, in a division that differs as the text `differing` says.

    Raises:
        UserError: on all ranks; the checkpoint cannot be read, or cannot be divided in another way.
    """
    for tag, engine in trainer.engines().items():
        _load_redivided(engine, trainer.world, folder, tag, differing)
    if trainer.world.is_main:
        get_logger().info("checkpoint divided among these ranks", file=str(folder), written_with=differing)


def _load_redivided(engine: Any, world: World, folder: Path, tag: str, differing: str) -> None:
    def read() -> tuple[SavedState, RankState]:
        try:
            saved = read_state(folder / tag, trained_parameters(engine))
            return saved, own_state(engine, saved, world)
        except Indivisible as error:
            raise UserError(
                f"checkpoint {folder} was written with {differing}, and cannot be divided in another way: {error}; "
                f"start the learner with its values, or begin a new run with model.path={folder / 'hf'}"
            ) from error
        except Exception as error:
            raise _unreadable(folder, error) from error

    saved, rank_state = world.raise_on_all_ranks(read)
    load_state(engine, rank_state, saved, world)


def _unreadable(folder: Path, error: Exception) -> UserError:
    return UserError(f"checkpoint {folder} cannot be read ({first_line(error)}); remove it to use an earlier one")


@dataclass(frozen=True, slots=True)
class FlatPiece:
    """`length` elements of a parameter from `start` on, which lie in a flat tensor from `offset` on."""

    name: str
    start: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class RankState:
    """The fp32 weights that one rank holds, as flat tensors, and the optimizer's state of each tensor by its number."""

    weights: list[torch.Tensor]
    states: dict[int, dict[str, Any]]


def trained_parameters(engine: Any) -> dict[str, torch.nn.Parameter]:
    """Trained parameters by their names in the policy, in the order that the optimizer has at stage 0."""
    return {name: parameter for name, parameter in engine.module.named_parameters() if parameter.requires_grad}


def own_state(engine: Any, saved: SavedState, world: World) -> RankState:
    """Assemble this rank's part of a saved state in host memory; raises `ValueError` if it is another model's."""
    shapes = {name: getattr(one, "ds_shape", one.shape) for name, one in trained_parameters(engine).items()}
    if shapes != {name: parameter.shape for name, parameter in saved.parameters.items()}:
        raise ValueError("it is of another model than this run trains")
    keys = {key for parameter in saved.parameters.values() for key in parameter.pieces}
    weights, states = [], {}
    for number, (size, places) in enumerate(_flat_pieces(engine, world.rank)):
        tensors = {key: torch.zeros(size) for key in keys}
        for place in places:
            parameter = saved.parameters[place.name]
            for key in parameter.pieces:
                part = parameter.part(key, place.start, place.length)
                tensors[key][place.offset : place.offset + place.length] = part
        weights.append(tensors.pop(FP32))
        # Copies: a shared counter in a tensor would be increased once for each state that shares it.
        states[number] = tensors | copy.deepcopy(saved.counts)
    return RankState(weights, states)


def load_state(engine: Any, rank_state: RankState, saved: SavedState, world: World) -> None:
    """Load this rank's state into the engine; all ranks together."""
    stage, optimizer = engine.zero_optimization_stage(), engine.optimizer
    if stage == 0:
        parameters = list(trained_parameters(engine).values())
        for number, parameter in enumerate(parameters):
            parameter.data.copy_(rank_state.weights[number].view_as(parameter))
            for key, value in rank_state.states[number].items():
                if key not in saved.counts:
                    rank_state.states[number][key] = value.view_as(parameter)
        optimizer.load_state_dict(_optimizer_state(optimizer.state_dict(), rank_state, saved))
    else:
        # DeepSpeed's keys for the optimizer's state and for its fp32 weights.
        state, weights = "base_optimizer_state", "single_partition_of_fp32_groups"
        if stage == 3:
            state, weights = "optimizer_state_dict", "fp32_flat_groups"
            optimizer.checkpoint_event_prologue()
        content = optimizer.state_dict()
        content |= {weights: rank_state.weights, state: _optimizer_state(content[state], rank_state, saved)}
        with redirect_stdout(io.StringIO()):  # DeepSpeed prints for debugging
            optimizer.load_state_dict({world.rank: content}, load_from_fp32_weights=True)
        if stage == 3:
            optimizer.checkpoint_event_epilogue()
        else:
            optimizer.update_lp_params()
    for name, value in saved.counters.items():
        setattr(engine, name, value)


def _flat_pieces(engine: Any, rank: int) -> Iterator[tuple[int, list[FlatPiece]]]:
    """Size of each tensor that this rank's optimizer changes, and the places of parameters in it."""
    stage, zero, names = engine.zero_optimization_stage(), engine.optimizer, engine.param_names
    if stage == 0:
        for name, parameter in trained_parameters(engine).items():
            yield parameter.numel(), [FlatPiece(name, 0, 0, parameter.numel())]
    elif stage == 3:
        for group, flat in zip(zero.fp16_groups, zero.fp32_partitioned_groups_flat, strict=True):
            yield flat.numel(), list(_even_pieces(group, names, rank))
    else:
        groups = zero.bit16_groups if hasattr(zero, "bit16_groups") else zero.bf16_groups
        for group, own in zip(groups, zero.optimizer.param_groups, strict=True):
            places = [_mapped_piece(names[one], one._hp_mapping) for one in group if one._hp_mapping is not None]
            yield own["params"][0].numel(), places


def _mapped_piece(name: str, mapping: Any) -> FlatPiece:
    start, flat = mapping.lp_fragment_address.start, mapping.hp_fragment_address
    return FlatPiece(name, start, flat.start, flat.numel)


def _even_pieces(group: list[Any], names: dict[Any, str], rank: int) -> Iterator[FlatPiece]:
    """Under ZeRO 3 each parameter is divided evenly, and its last piece is padded."""
    offset = 0
    for parameter in group:
        size = parameter.ds_tensor.numel()
        yield FlatPiece(names[parameter], rank * size, offset, max(0, min(size, parameter.ds_numel - rank * size)))
        offset += size


def _optimizer_state(own: dict[str, Any], rank_state: RankState, saved: SavedState) -> dict[str, Any]:
    """The state as torch's optimizer loads it: the saved settings replace those of its own groups."""
    return {"state": rank_state.states, "param_groups": [group | saved.settings for group in own["param_groups"]]}
