"""A model's state at the end of each prompt, as a short vector from which rewards can be predicted.

The state is the hidden states of the prompt's last token, when the model is about to answer (POISE, arXiv 2605.07579;
BASIS, arXiv 2605.27293). Those of the middle and the last layer are scaled per dimension, reduced to their principal
components, each divided by the square root of its standard deviation, and scaled to length 1. Full whitening would
weigh noise as much as the largest differences, and without whitening the regression would hardly use the smaller
components: half whitening predicts best (docs/studies.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from learner.policy.attention import pack_sequences
from learner.policy.model import Policy

WIDTH = 128  # numbers per prompt, at most
BASIS = 8192  # prompts from which the components are computed, at most
SPARE = 32  # extra components, which make the last ones more accurate
ITERATIONS = 4  # of the randomised decomposition


class Components:
    """Principal components of states, computed from some of them, float32 [N, 2H]."""

    def __init__(self, states: torch.Tensor) -> None:
        # The added terms keep dimensions that differ only by rounding errors from being scaled up.
        spread = states.std(0, correction=0) + 1e-4 * states.abs().mean() + 1e-6
        self._mean, self._scale = states.mean(0), spread
        scaled = (states - self._mean) / self._scale
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            _, sizes, basis = torch.svd_lowrank(scaled, min(WIDTH + SPARE, *scaled.shape), ITERATIONS)
        deviations = sizes / len(states) ** 0.5  # of the components; that of a dimension is 1
        kept = (deviations > 0.01).nonzero()[:WIDTH, 0]
        self._basis = basis[:, kept] / deviations[kept].sqrt()

    def vectors(self, states: torch.Tensor) -> np.ndarray:
        """Vectors of length 1, float16 [N, D] with D at most `WIDTH`, of states [N, 2H]."""
        vectors = (states - self._mean) / self._scale @ self._basis
        return torch.nn.functional.normalize(vectors, dim=1).half().numpy()


@torch.no_grad()
def prompt_states(
    policy: Policy,
    device: torch.device,
    prompts: Sequence[np.ndarray],
    token_budget: int,
    progress: Callable[[int], None] = lambda done: None,
) -> np.ndarray:
    """The state of each prompt, float16 [N, D] with D at most `WIDTH`; the prompts are rows of token ids.

    Args:
        token_budget: tokens of a forward pass.
        progress: called with the number of prompts done so far.
    """
    order = np.random.default_rng(0).permutation(len(prompts))
    vectors = np.zeros((len(prompts), 0), np.float16)
    components: Components | None = None
    done = 0
    for start in range(0, len(prompts), BASIS):
        part = order[start : start + BASIS].tolist()
        states: list[torch.Tensor] = []
        for rows in _packed([prompts[i] for i in part], token_budget):
            states.append(_states(policy, device, rows))
            done += len(rows)
            progress(done)
        together = torch.cat(states)
        if components is None:
            components = Components(together)
            vectors = np.zeros((len(prompts), components.vectors(together[:1]).shape[1]), np.float16)
        vectors[part] = components.vectors(together)
    return vectors


def _packed(prompts: Sequence[np.ndarray], token_budget: int) -> Iterator[list[np.ndarray]]:
    """Lists of consecutive prompts within the token budget; a longer prompt is alone in its list."""
    rows: list[np.ndarray] = []
    for prompt in prompts:
        if rows and sum(map(len, rows)) + len(prompt) > token_budget:
            yield rows
            rows = []
        rows.append(prompt)
    yield rows


def _states(policy: Policy, device: torch.device, prompts: Sequence[np.ndarray]) -> torch.Tensor:
    """States of packed prompts, float32 [N, 2H] on the CPU."""
    lengths = [len(prompt) for prompt in prompts]
    ids = torch.from_numpy(np.concatenate(prompts).astype(np.int64))[None]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    last = torch.tensor(lengths).cumsum(0) - 1
    return policy.states(ids.to(device), positions.to(device), pack_sequences(lengths, device), last.to(device)).cpu()
