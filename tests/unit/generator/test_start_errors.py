"""Mistakes in a generator's configuration are reported before it waits for a queue, a learner or an engine."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from common.config import load_config, parse_config
from common.errors import UserError
from generator import cli
from generator.engine.arguments import OWN_NAMES, check_engine_names, engine_names, shortened

# No server listens there: a generator that comes so far fails with another error.
NOWHERE = {"url": "redis://127.0.0.1:1/0", "wait": 0.0}
TREE: dict[str, Any] = {"model": {"path": "no model"}, "data": {"train": "t"}, "broker": NOWHERE}
CORRECTOR = {"user": "corrector", "max_assistant_turns": 4}


def serve(**sections: Any) -> None:
    asyncio.run(cli._serve(parse_config(TREE | sections), "g"))


@pytest.mark.parametrize(
    ("section", "values", "words"),
    [
        ("episode", CORRECTOR | {"user_options": {"turns": 0}}, "user_options of 'corrector': turns = 0"),
        ("generator", {"engine": {"tensor_paralel_size": 2}}, "did you mean tensor_parallel_size"),
    ],
    ids=str,
)
def test_it_is_one_error_before_anything_is_waited_for(section: str, values: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        serve(**{section: values})


@pytest.mark.parametrize(("turns", "warning"), [(2, ""), (5, "episode.user_options.turns = 5 is cut short to 3")])
def test_what_is_right_comes_as_far_as_the_queue(turns: int, warning: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=r"127\.0\.0\.1:1"):
        serve(episode=CORRECTOR | {"user_options": {"turns": turns}})
    assert warning in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "1 validation error for ModelConfig\n  Value error, User-specified max_model_len (128) is greater than the "
            "derived max_model_len (max_position_embeddings=64.0 or model_max_length=None in model's config.json). To "
            "allow overriding this maximum, ... [type=value_error, input_value=ArgsKwargs((), {'model': ...})]",
            "model.max_model_len = 128, and the model was made for 64 tokens; lower it",
        ),
        (
            "1 validation error for ModelConfig\n  Value error, Model architectures ['A'] are not supported for now. "
            "Supported architectures: dict_keys(['B', 'C']) [type=value_error, input_value=ArgsKwargs((), {})]",
            "Model architectures ['A'] are not supported for now.",
        ),
        ("word " * 200, "word " * 80 + "..."),
    ],
)
def test_what_vllm_refuses_is_a_line_without_its_frame(text: str, line: str) -> None:
    assert shortened(ValueError(text)) == line


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tensor_parallel", "'tensor_parallel'; did you mean tensor_parallel_size"),
        ("warp_drive", "'warp_drive'; see vLLM's engine arguments"),
        ("weight_transfer_config", "set learner.weights instead of weight_transfer_config"),
        ("logprobs_mode", "'processed_logprobs', which training needs"),
    ],
)
def test_an_engine_name_is_refused_with_what_may_be_meant(name: str, words: str) -> None:
    with pytest.raises(UserError, match=f"generator.engine: .*{words}"):
        check_engine_names(parse_config(TREE | {"generator": {"engine": {name: 1}}}))


def test_what_vllm_knows_is_taken() -> None:
    names = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "quantization", "max_num_seqs")
    check_engine_names(parse_config(TREE | {"generator": {"engine": dict.fromkeys(names, 2)}}))
    assert OWN_NAMES.keys() <= engine_names()


WHOLE, SINGLE = {"SPO__GENERATOR__ENGINE": '{"a": "fp8"}'}, {"SPO__GENERATOR__ENGINE__A": "awq"}


@pytest.mark.parametrize(
    ("environment", "overrides", "engine"),
    [
        (WHOLE, [], {"a": "fp8"}),
        (SINGLE, [], {"seed": 4, "a": "awq"}),
        (SINGLE | WHOLE, [], {"a": "awq"}),  # whichever the environment lists first
        ({}, ["generator.engine={a: fp8}"], {"a": "fp8"}),
        ({}, ["generator.engine.a=fp8"], {"seed": 4, "a": "fp8"}),
    ],
)
def test_a_mapping_replaces_and_single_keys_add(
    tmp_path: Path, environment: dict[str, str], overrides: list[str], engine: dict[str, Any]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: {path: m}\ndata: {train: t}\ngenerator: {engine: {seed: 4}}\n")
    assert load_config(file, overrides, environment).generator.engine == engine


@pytest.mark.integration
def test_vllm_is_not_imported_for_its_names() -> None:
    code = (
        "import sys; from generator.engine.arguments import engine_names;"
        "sys.exit('vllm' in sys.modules or not engine_names())"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
