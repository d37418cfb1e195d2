"""What a generator's configuration has wrong is said before it waits for a queue, a learner or an engine."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.config import parse_config
from common.errors import UserError
from generator import cli
from generator.engine.arguments import shortened

# Nobody listens there: whoever gets so far waits, and fails with another error.
NOWHERE = {"url": "redis://127.0.0.1:1/0", "wait": 0.0}


def tree(**episode: Any) -> dict[str, Any]:
    return {
        "model": {"path": "no model"},
        "data": {"train": "t"},
        "episode": {"max_assistant_turns": 4} | episode,
        "broker": NOWHERE,
    }


@pytest.mark.parametrize(
    ("episode", "said"),
    [
        ({"user": "corrector", "user_options": {"turns": 0}}, "user_options of 'corrector': turns = 0"),
        (
            {"user": "corrector", "user_options": {"turn": 2}},
            "user_options of 'corrector': .*'turn'; allowed: checker,",
        ),
        ({"user": "corrector", "user_options": {"turns": "two"}}, "turns = 'two': input should be a valid integer"),
        ({"user": "corrector", "user_options": {"checker": "judgement"}}, "'judgement' is unknown"),
        ({"user": "nobody"}, "episode.user = 'nobody' is unknown"),
        ({"user": "llm", "user_options": {"model": "m"}}, "user_options of 'llm': .*'base_url'"),
        (
            {"user": "llm", "user_options": {"model": "m", "base_url": "http://127.0.0.1:1", "api_key_env": "NO_KEY"}},
            "api_key_env = 'NO_KEY': no such environment variable",
        ),
        ({"tools": ["abacus"]}, "episode.tools = 'abacus' is unknown"),
        ({"reward": "length", "reward_options": {"length": {"free": -1}}}, "reward_options of 'length': free = -1"),
        ({"call_format": "xml"}, "episode.call_format = 'xml' is unknown"),
    ],
    ids=str,
)
def test_it_is_one_error_before_anything_is_waited_for(episode: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        asyncio.run(cli._serve(parse_config(tree(**episode)), "g"))


def test_what_is_right_comes_as_far_as_the_queue() -> None:
    with pytest.raises(UserError, match=r"127\.0\.0\.1:1"):
        asyncio.run(cli._serve(parse_config(tree(user="corrector", user_options={"turns": 2})), "g"))


@pytest.mark.integration
def test_the_command_ends_with_one_line_and_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree(user="corrector", user_options={"discount": 2})))
    command = [sys.executable, "-m", "generator.cli", "-c", str(tmp_path / "run.yaml")]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    lines = [line for line in ran.stderr.splitlines() if line.startswith("error: ")]
    assert (ran.returncode, len(lines)) == (2, 1), ran.stderr
    assert "episode.user_options of 'corrector'" in lines[0]
    assert "Traceback" not in ran.stderr


def test_a_user_who_is_cut_short_is_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=r"127\.0\.0\.1:1"):
        asyncio.run(cli._serve(parse_config(tree(user="corrector", user_options={"turns": 5})), "g"))
    assert "episode.user_options.turns = 5 is cut short to 3" in capsys.readouterr().err


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
        ("", "ValueError"),
    ],
)
def test_what_vllm_refuses_is_a_line_without_its_frame(text: str, line: str) -> None:
    assert shortened(ValueError(text)) == line
