"""Checks at every start that the model computes packed sequences as transformers computes each of them alone.

A model that would be trained wrongly without an error is refused: one with layers that mix the sequences of a batch in
a way that `learner.policy.packing` does not separate, with a part of an attention that the implementation lacks, or
with an output that `learner.policy.logprobs` computes differently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from common.errors import UserError, first_line
from learner.policy.attention import PackedSequences, pack_sequences
from learner.policy.model import body_of, read_packed

LENGTHS = (7, 5, 9, 6)  # short, so that a layer that reads just a few earlier tokens shows
# Largest mean |difference|: rounding in float32, and in 16 bits, where two implementations of attention differ more.
SAME, SAME_IN_16_BITS = 1e-4, 0.1


@torch.no_grad()
def check_policy(engine: Any, path: str) -> None:
    """Compare log-probs of a few short sequences, packed and one by one; all ranks call this together.

    Raises:
        UserError: they differ, or the model cannot compute packed sequences.
    """
    policy = engine.module
    ids, positions, sequences = _probe(policy.model)
    predict = torch.cat([part[:-1] for part in torch.arange(ids.shape[1], device=ids.device).split(LENGTHS)])

    def packed() -> torch.Tensor:
        logprobs: torch.Tensor = engine(ids, positions, sequences, predict, ids[0, predict + 1], temperature=1.0)[0]
        return logprobs

    def alone(row: torch.Tensor) -> torch.Tensor:
        logits = policy.model(input_ids=row, use_cache=False).logits[0, :-1].float()
        return logits.log_softmax(-1).gather(1, row[0, 1:, None])[:, 0]

    _compare(policy, packed, alone, ids, f"model.path = {path!r}", "log-probs")


@torch.no_grad()
def check_critic(engine: Any, path: str, key: str) -> None:
    """Like `check_policy`, but compare hidden states, each scaled to the same length: a new critic's output is zero."""
    critic = engine.module
    ids, positions, sequences = _probe(critic.model)

    def states(output: Any) -> torch.Tensor:
        hidden: torch.Tensor = output.last_hidden_state[0].float()
        return hidden / hidden.square().mean(-1, keepdim=True).sqrt()

    _compare(
        critic,
        lambda: states(read_packed(critic.model, ids, positions, sequences)),
        lambda row: states(body_of(critic.model)(input_ids=row, use_cache=False)),
        ids,
        f"{key} = {path!r}",
        "hidden states",
    )


def _probe(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor, PackedSequences]:
    """Random token ids [1, T] of sequences of `LENGTHS`, their positions [1, T], and where they begin and end."""
    vocabulary = int(model.config.get_text_config().vocab_size)
    ids = torch.randint(vocabulary, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    device = next(model.parameters()).device
    return ids.to(device), positions.to(device), pack_sequences(LENGTHS, device)


def _compare(
    wrapper: Any,
    packed: Callable[[], torch.Tensor],
    alone: Callable[[torch.Tensor], torch.Tensor],
    ids: torch.Tensor,
    named: str,
    what: str,
) -> None:
    model = wrapper.model
    try:
        ours = packed()
        with as_transformers(model):
            wrapper.packing.sequences = None
            theirs = torch.cat([alone(row) for row in ids.split(LENGTHS, dim=1)])
    except (TypeError, ValueError, RuntimeError, IndexError, AttributeError) as error:
        # Neither too little memory nor, among several ranks, the death of another one is a fault of the model.
        is_divided = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
        if isinstance(error, torch.OutOfMemoryError) or (isinstance(error, RuntimeError) and is_divided):
            raise
        raise UserError(
            f"{named}: {type(model).__name__} cannot compute packed sequences: {first_line(error)}"
        ) from error
    difference = float((ours - theirs).abs().mean())
    bound = SAME if model.dtype.itemsize == 4 else SAME_IN_16_BITS
    if not difference <= bound:
        raise UserError(
            f"{named}: {type(model).__name__} computes other {what} for packed sequences than for each alone: "
            f"{difference:.2g} apart on average (rounding explains {bound:g}); it has layers or an output that the "
            "learner does not compute exactly, so it cannot be trained"
        )


@contextmanager
def as_transformers(model: PreTrainedModel) -> Iterator[None]:
    """Within the block the model computes attention as transformers' own code does, without a kernel."""
    configs: list[Any] = [
        part.config for part in model.modules() if isinstance(getattr(part, "config", None), PreTrainedConfig)
    ]
    before = [config._attn_implementation_internal for config in configs]
    for config in configs:
        config._attn_implementation_internal = "eager"
    try:
        yield
    finally:
        for config, implementation in zip(configs, before, strict=True):
            config._attn_implementation_internal = implementation
