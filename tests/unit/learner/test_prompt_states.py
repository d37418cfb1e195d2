"""The states of prompts: what the model holds at their last tokens, reduced so that what differs most counts most."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from learner.policy.model import load_policy
from learner.policy.prompt_states import prompt_states
from tests.support.learner import VOCABULARY, learner_config

CPU = torch.device("cpu")


def similarities(vectors: np.ndarray) -> np.ndarray:
    """Of each two prompts, [N, N]: they do not depend on the signs of components."""
    return vectors.astype(float) @ vectors.astype(float).T


def test_packed_prompts_have_the_states_of_each_alone_half_whitened(model: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCABULARY, int(rng.integers(1, 30))).astype(np.int32) for _ in range(30)]
    done: list[int] = []
    policy = load_policy(learner_config(model, tmp_path))
    vectors = prompt_states(policy, CPU, prompts, token_budget=64, progress=done.append)
    assert (done[-1], len(done) > 5) == (30, True)

    plain, states = AutoModelForCausalLM.from_pretrained(model), []
    for prompt in prompts:
        with torch.no_grad():
            layers = plain(torch.from_numpy(prompt.astype(np.int64))[None], output_hidden_states=True).hidden_states
        states.append(torch.cat([layers[len(layers) // 2][0, -1], layers[-1][0, -1]]).double().numpy())
    scaled = (np.array(states) - np.mean(states, 0)) / np.std(states, 0)
    left, sizes, _ = np.linalg.svd(scaled, full_matrices=False)
    expected = left[:, :-1] * np.sqrt(sizes[:-1])  # the last component is what centring took
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    assert vectors.shape == (30, 29)
    assert similarities(vectors) == pytest.approx(similarities(expected), abs=5e-3)


def test_many_prompts_share_the_components_of_some_of_them(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(1)
    some = [rng.integers(0, VOCABULARY, 8).astype(np.int32) for _ in range(30)]
    monkeypatch.setattr("learner.policy.prompt_states.BASIS", 25)
    prompts = [*some, *some]  # each twice, so that most are seen both before and after the components are found
    vectors = prompt_states(load_policy(learner_config(model, tmp_path)), CPU, prompts, token_budget=64)
    assert vectors.shape == (60, 21)  # of the 25, 22 are different
    assert np.abs(vectors[:30].astype(float) - vectors[30:]).max() < 2e-3
