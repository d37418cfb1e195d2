"""`spo init`: what it writes passes the checks of a run, and says what was found in the rows and what was guessed."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from common.config import load_config
from launcher.init import configuration
from tests.support.sampler import write_rows
from tests.support.spo_command import Spo
from tests.support.task import build_tokenizer


def asked(column: str, answers: list[Any], prompt: str = "question") -> list[dict[str, Any]]:
    return [{prompt: f"What is {i}?", "level": i} | ({} if a is None else {column: a}) for i, a in enumerate(answers)]


PAIRS = [{"input": "1\n", "output": "2\n"}]
LONG = "The answer to this is not short, because it goes on and on, far beyond a line of text. "
CASES: dict[str, tuple[list[dict[str, Any]], dict[str, Any], str]] = {
    "numbers": (
        asked("answer", [1, "2", "3,000.5", "-4%"]),
        {"reward": "math", "answer_column": "answer"},
        "# reward: guessed from the 4 values of 'answer', numbers",
    ),
    "solutions": (
        asked("Answer", [f"so it is\n#### {i}" for i in range(4)], "Problem"),
        {"reward": "math", "prompt_column": "Problem", "answer_column": "Answer", "answer_after": "####"},
        "solutions that end with ####",
    ),
    "formulas": (asked("solution", ["x = \\boxed{2}", "\\frac12"]), {"reward": "math"}, "formulas"),
    "choices": (asked("label", ["A", "B", "B", "A"] * 3), {"reward": "exact", "answer_column": "label"}, "2 choices"),
    "short texts": (asked("target", ["Paris", "Rome", "Oslo"]), {"reward": "exact"}, "short texts"),
    "long texts": (asked("answer", [f"{LONG}{i}" for i in range(3)]), {"reward": "exact"}, "# reward: DOUBTFUL"),
    "tests": (
        asked("test_cases", [PAIRS, PAIRS]),
        {"reward": "code", "reward_options": {"code": {"tests": "test_cases"}}, "answer_column": None},
        "guessed from the column 'test_cases'",
    ),
    "nested": (
        asked("reward_model", [{"ground_truth": "7"}, {"ground_truth": "8"}], "prompt"),
        {"reward": "math", "answer_column": "reward_model.ground_truth"},
        "numbers",
    ),
    "no answers": (asked("answer", [None, None]), {"reward": "length", "answer_column": None}, "# reward: NAME ONE"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_reward_is_guessed_from_the_answers(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, expected, comment = CASES[case]
    monkeypatch.setattr("launcher.layout.gpus.read_gpus", lambda environ: [])
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "train.jsonl", *rows)
    text = configuration("train.jsonl", None)
    assert comment in text
    assert f"# Columns of the first {len(rows)} rows: {', '.join(rows[0])}" in text
    made = yaml.safe_load(text)
    written = made["data"] | made["episode"]
    assert {key: written[key] for key in expected} == expected


@pytest.mark.parametrize(("gigabytes", "fits"), [(70, True), (78, False)])
def test_a_model_that_leaves_no_room_for_cuda_does_not_fit(
    gigabytes: int, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = SimpleNamespace(rank=lambda ranks: SimpleNamespace(peak=gigabytes * 10**9))
    monkeypatch.setattr("launcher.layout.gpus.read_gpus", lambda environ: [SimpleNamespace(total=80 * 10**9)])
    monkeypatch.setattr("launcher.layout.needs.needs_of", lambda config: needs)
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "train.jsonl", *CASES["numbers"][0])
    text = configuration("train.jsonl", None)
    assert f"a rank takes {gigabytes}.0 GB; the GPU has 80.0 GB" in text
    assert ("DOES NOT FIT" not in text) == fits


@pytest.mark.integration
@pytest.mark.parametrize("case", ["numbers", "tests", "no answers"])
def test_what_is_written_passes_the_checks_of_a_run(case: str, tmp_path: Path, spo: Spo) -> None:
    rows, _, _ = CASES[case]
    write_rows(tmp_path / "train.jsonl", *rows)
    write_rows(tmp_path / "test.jsonl", rows[0])
    build_tokenizer().save_pretrained(tmp_path / "model")
    assert spo("init", "train.jsonl", "--model", "model").returncode == 0
    assert spo("config", "run.yaml").stderr == "", "no setting without effect"
    checked = spo("data", "check", "run.yaml", "--json")
    assert checked.returncode == 0
    train = json.loads(checked.stdout)["sources"][0]
    assert (train["usable"], train["too_long"]) == (len(rows), 0)
    config = load_config(tmp_path / "run.yaml", (), {})
    assert config.data.heldout == "test.jsonl"
    longest = train["tokens"]["max"]
    assert longest <= config.data.max_prompt_tokens < longest + 64
    assert config.model.max_model_len == config.data.max_prompt_tokens + config.episode.max_response_tokens
