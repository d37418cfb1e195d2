"""What is published agrees: the references with the code, and the configurations with the papers."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spo
from common.config import Config, SelectionConfig, TrackerConfig, load_config
from common.config.warnings import warnings
from common.metrics import BATCH, STEP, TIME, Metric, metric
from generator.tools.toolbox import Toolbox
from launcher.config_reference import reference
from launcher.folder.metrics import Metrics
from launcher.folder.run import Run
from launcher.folder.run_folder import find_runs
from launcher.metrics_reference import tables
from launcher.page.panels import panels
from launcher.python_reference import page
from sampler.prompts.prompt_set import SourcePrompts, prompt_hash
from tests.support.documented import section
from tests.support.run_folder import make_run, write_metrics

ROOT = Path(__file__).parents[3]
ROWS = (*BATCH, *STEP, *TIME)
PREFIXES = {row.name.partition("/")[0] for row in ROWS}
UNITS = {row.unit for row in ROWS}
FOLDERS = ("sampler", "generator", "learner", "relay", "launcher")


def names_in(path: Path) -> set[str]:
    """Texts in a file that look like a metric's name, except units."""
    texts = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
    named = {text for text in texts if isinstance(text, str) and re.fullmatch(r"[a-z_]+/[\w@.]*\w", text)}
    return {text for text in named - UNITS if text.partition("/")[0] in PREFIXES}


def test_the_committed_reference_of_the_configuration_is_current() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8") == reference()


def test_the_committed_reference_of_python_is_current() -> None:
    assert (ROOT / "docs" / "python.md").read_text(encoding="utf-8") == page(spo), "spo docs-python > docs/python.md"


def test_the_page_has_the_table() -> None:
    for title, table in tables().items():
        assert table in section("metrics.md", title), "run `spo docs-metrics` and copy its tables"


def test_the_code_names_only_metrics_of_the_table() -> None:
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        for name in names_in(path):
            metric(name)


def test_panels_draw_what_the_table_says_they_draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run(tmp_path / "mine")
    for row in filter(lambda row: row.panel, ROWS):
        of = row.name.partition("/")[0]
        process = "generator-1" if of == "generator" else "learner" if row in STEP else "sampler"
        for version, word in product((1, 2), "xy"):
            write_metrics(folder, version, {row.name.replace("…", word): 0.5}, process)
    run = Run(find_runs([folder])[0])
    run.update_metrics()
    asked: set[Metric] = set()

    def recorded(read: Callable[..., Any]) -> Callable[..., Any]:
        def reads(self: Metrics, name: str, *arguments: Any) -> Any:
            asked.add(metric(name))
            return read(self, name, *arguments)

        return reads

    for name in ("series", "timeline", "histogram", "last"):
        monkeypatch.setattr(Metrics, name, recorded(getattr(Metrics, name)))
    titles = {panel["title"] for panel in panels(run)}
    assert {row.panel for row in ROWS if row.panel} <= titles
    assert {row.name for row in ROWS if row.panel} - {row.name for row in asked} == set()


# The published configurations have the published numbers, and no setting without effect.

CONFIGS = ROOT / "configs"
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
    prompt = SourcePrompts(source, [row], np.array([0]), [prompt_hash(row["prompt"])])[0]
    assert (prompt.prompt, prompt.answer, prompt.row["data_source"]) == (row["prompt"], "34", "math_dapo")
