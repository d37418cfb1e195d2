"""`spo data demonstrations` takes what was right, once each; a run folder as `model.path` is its newest export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.config import load_config
from common.errors import UserError
from tests.support.sampler import write_rows
from tests.support.spo_command import Spo


def answer(prompt: str, said: str, score: Any = 1.0, **others: Any) -> dict[str, Any]:
    messages = [{"role": "assistant", "content": said}]
    return {"prompt_id": prompt, "input": prompt, "output": said, "score": score, "messages": messages} | others


TOKENS = {"token_ids": [1, 2, 3], "model_spans": [[1, 3]]}
TWO_TURNS = [{"role": "assistant", "content": "a"}, {"role": "tool", "content": "b"}]
ANSWERS = [
    answer("p", "1"),
    answer("p", "1"),
    answer("p", "2", **TOKENS),
    answer("p", "3"),
    answer("q", "1", 0.5),
    answer("q", "2", messages=TWO_TURNS),
    answer("q", "3", messages=TWO_TURNS, **TOKENS),
    answer("q", "4", "much"),
    answer("q", "5", messages=7),
    answer("q", "6", messages=[{"role": "assistant", "content": None, "tool_calls": []}]),
]


def test_right_answers_are_taken_once_each_and_the_others_counted(spo: Spo, tmp_path: Path) -> None:
    path, output = write_rows(tmp_path / "answers.jsonl", *ANSWERS, "not JSON"), tmp_path / "rows.jsonl"
    ran = spo("data", "demonstrations", path, "--per-prompt", 2, "--output", output)
    assert ran.stdout.startswith(f"{output}: 3 answers to 2 prompts; left out: ")
    left_out = "1 identical, 1 beyond --per-prompt, 2 below --reward, 3 without tokens or text, 1 unreadable"
    assert all(count in ran.stdout for count in left_out.split(", "))
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(row["prompt"], row.get("completion"), row.get("token_ids")) for row in rows] == [
        ("p", "1", None),
        ("p", None, [1, 2, 3]),
        ("q", None, [1, 2, 3]),
    ]
    ran = spo("data", "demonstrations", path, "--reward", 2, "--output", output)
    assert (ran.returncode, "below --reward" in ran.stderr) == (2, True)


def export(folder: Path, version: int, has_model: bool = True) -> Path:
    checkpoint = folder / "checkpoints" / f"step_{version}"
    (checkpoint / "hf").mkdir(parents=True)
    (checkpoint / "checkpoint.json").touch()
    if has_model:
        (checkpoint / "hf" / "config.json").touch()
    return checkpoint / "hf"


def test_a_run_folder_is_its_newest_export_until_the_run_has_begun(tmp_path: Path) -> None:
    config, sft = tmp_path / "run.yaml", tmp_path / "sft"
    config.write_text(f"run: {{output_dir: {tmp_path}, experiment: later}}\ndata: {{train: none.jsonl}}\n")

    def model(path: Path) -> str:
        return load_config(config, [f"model.path={path}"]).model.path

    (sft / "checkpoints").mkdir(parents=True)
    with pytest.raises(UserError, match="without an exported checkpoint"):
        model(sft)
    older = export(sft, 9)
    export(sft, 10, has_model=False)
    assert model(sft) == model(older.parent) == model(older) == str(older)
    (tmp_path / "later").mkdir()
    (tmp_path / "later" / "config.yaml").write_text(f"model: {{path: {older}}}\n")
    newer = export(sft, 20)
    assert model(sft) == str(older)
    assert model(newer.parent) == str(newer)
    assert model(tmp_path / "none") == str(tmp_path / "none")
