"""A fixed prompt scored by the learner, by which generators check that a version's weights have arrived."""

from __future__ import annotations

import torch

from common.weights.wire import ScoredPrompt
from learner.attention import pack_sequences
from learner.trainer import Trainer

LENGTH = 32  # tokens at most
STRIDE = 7919  # a prime, so that the tokens are spread over the vocabulary


@torch.no_grad()
def scored_prompt(trainer: Trainer) -> ScoredPrompt:
    """The prompt and its log-probs at temperature 1 under the current weights; all ranks must call this together."""
    # Special tokens, which an engine may treat in its own way, mostly come last in a vocabulary.
    plain = max(trainer.policy.vocabulary // 2, 1)
    length = min(LENGTH, trainer.config.model.max_model_len)
    token_ids = [STRIDE * (position + 1) % plain for position in range(length)]
    device = trainer.world.device
    tokens = torch.tensor(token_ids, device=device)
    logprobs, _ = trainer.engine(
        tokens[None],
        torch.arange(length, device=device)[None],
        pack_sequences([length], device),
        torch.arange(length - 1, device=device),
        tokens[1:],
        temperature=1.0,
    )
    return ScoredPrompt(token_ids, logprobs.tolist())
