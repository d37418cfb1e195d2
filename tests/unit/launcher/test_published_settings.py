"""The published configurations have the published numbers, and no setting without effect."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from common.config import Config, SelectionConfig, TrackerConfig, load_config
from common.config.warnings import warnings
from generator.tools.toolbox import Toolbox
from sampler.prompts.prompt_set import SourcePrompts

CONFIGS = Path(__file__).parents[3] / "configs"
PUBLISHED = sorted(path.stem for path in CONFIGS.glob("qwen*.yaml"))
# Batch and mini-batch in samples, and responses a prompt (arXiv 2509.13232 and its recipe).
SIZES = {
    "qwen3-8b-maths": (768, 96, 1),
    "qwen3-8b-maths-1024": (1024, 128, 1),
    "qwen3-8b-maths-grpo": (96 * 8, 12 * 8, 8),
    "qwen3-8b-maths-grpo-1024": (128 * 8, 16 * 8, 8),
    "qwen3-8b-code": (768, 96, 1),
}


def read(name: str) -> Config:
    return load_config(CONFIGS / f"{name}.yaml", (), {})


@pytest.mark.parametrize("name", PUBLISHED)
def test_episodes_fit_and_nothing_is_without_effect(name: str) -> None:
    config = read(name)
    assert config.run.name == config.run.experiment == name
    assert config.data.max_prompt_tokens + config.episode.max_response_tokens <= config.model.max_model_len
    assert config.learner.token_budget >= config.model.max_model_len
    assert config.learner.lr == 1e-6
    assert warnings(config) == []


@pytest.mark.parametrize("name", ["qwen3-8b-maths", "qwen3-8b-maths-1024"])
def test_the_papers_runs_have_the_papers_tracker(name: str) -> None:
    sampler = read(name).sampler
    assert sampler.tracker.model_dump() == TrackerConfig().model_dump()
    assert sampler.selection == SelectionConfig()
    assert sampler.drift.mode == "rescore"


@pytest.mark.parametrize("name", SIZES)
def test_sizes_and_losses_are_the_published_ones(name: str) -> None:
    config = read(name)
    algorithm, episode = config.algorithm, config.episode
    batch, mini, responses = SIZES[name]
    assert (config.sampler.batch_size, config.sampler.batch_size // config.learner.mini_batches) == (batch, mini)
    assert algorithm.responses == responses
    assert (algorithm.loss_options, algorithm.kl_coef) == ({"low": 0.2, "high": 0.28, "cap": 10.0}, 0.0)
    assert (config.eval.samples, config.eval.temperature, config.eval.top_p, config.eval.top_k) == (16, 0.6, 0.95, 20)
    assert config.eval.every == 10
    assert (config.data.max_prompt_tokens, episode.max_response_tokens, episode.max_assistant_turns) == (2048, 8192, 8)


@pytest.mark.parametrize("name", [name for name in SIZES if "maths" in name])
def test_programs_have_the_recipes_thirty_seconds(name: str) -> None:
    episode = read(name).episode
    seconds = Toolbox(episode, {"sandbox": lambda: None}).tools["code_interpreter"].run_timeout
    assert (seconds, episode.tool_timeout > seconds) == (30.0, True)


@pytest.mark.parametrize("size", ["", "-1024"])
def test_spo_and_its_grpo_twin_differ_in_the_method_alone(size: str) -> None:
    spo, grpo = (read(name).model_dump() for name in (f"qwen3-8b-maths{size}", f"qwen3-8b-maths-grpo{size}"))
    for twin in (spo, grpo):
        del twin["run"], twin["data"]  # names of the run, and of the data set's copies
        for of_the_tracker in ("tracker", "selection", "drift"):
            del twin["sampler"][of_the_tracker]
        del twin["algorithm"]["method"]
    assert spo == grpo


def test_the_maths_configuration_reads_rows_of_its_data_set() -> None:
    (source,) = read("qwen3-8b-maths").data.sources("train")
    row = {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": "What is 17 + 17?"}],
        "reward_model": {"ground_truth": "34", "style": "rule"},
    }
    prompt = SourcePrompts(source, [row], np.array([0]), ["id"])[0]
    assert (prompt.prompt, prompt.answer, prompt.row["data_source"]) == (row["prompt"], "34", "math_dapo")
