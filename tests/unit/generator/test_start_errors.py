"""Mistakes in a generator's configuration are reported before it waits for a queue, a learner or an engine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from common.config import parse_config
from common.errors import UserError
from generator import cli
from generator.engine.arguments import OWN_NAMES, check_engine_names, engine_names, shortened

# No server listens there: a generator that comes so far fails with another error.
TREE: dict[str, Any] = {
    "model": {"path": "no model"},
    "data": {"train": "t"},
    "broker": {"url": "redis://127.0.0.1:1/0", "wait": 0.0},
}


def corrector(turns: int) -> dict[str, Any]:
    return {"episode": {"user": "corrector", "max_assistant_turns": 4, "user_options": {"turns": turns}}}


@pytest.mark.parametrize(
    ("sections", "words", "warning"),
    [
        (corrector(0), "user_options of 'corrector': turns = 0", ""),
        ({"generator": {"engine": {"tensor_paralel_size": 2}}}, "did you mean tensor_parallel_size", ""),
        # What is right comes as far as the queue.
        (corrector(5), r"127\.0\.0\.1:1", "episode.user_options.turns = 5 is cut short to 3"),
    ],
    ids=["user", "engine", "queue"],
)
def test_it_is_one_error_before_anything_is_waited_for(
    sections: dict[str, Any], words: str, warning: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match=words):
        asyncio.run(cli._serve(parse_config(TREE | sections), "g"))
    assert warning in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "1 validation error for ModelConfig\n  Value error, User-specified max_model_len (128) is greater than the "
            "derived max_model_len (max_position_embeddings=64.0 or model_max_length=None in model's config.json). To "
            "allow overriding this maximum, ... [type=value_error, input_value=ArgsKwargs((), {'model': ...})]",
            "model.max_model_len = 128, but the model was made for 64 tokens; lower it",
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
